// Trace: where in the run of a prompt the next token is decided, cell by cell as they come.

let stopTrace = null;

function traceBody() {
  const token = (id) => {
    const text = $(id).value;
    return /^#\d+$/.test(text) ? Number(text.slice(1)) : text;
  };
  const body = { model: state.model, prompt: $('trace-prompt').value,
    clean: $('trace-clean').value, answer: token('trace-answer'),
    points: [$('trace-point').value], layers: 'all', metric: $('trace-metric').value };
  if ($('trace-other').value && body.metric !== 'logprob') body.other = token('trace-other');
  if ($('trace-align').checked) body.align = 'end';
  return body;
}

// What of a cell is shown: the share that came back, or the change in nats.
const traceShown = (value, head) =>
  (value === null || head.metric === 'recovered' ? value : value - head.corrupt);

async function trace() {
  stopTrace = new AbortController();
  $('trace-stop').hidden = false;
  let drawn = 0;
  const result = { head: null, grid: null, rate: null };
  state.trace = result;
  try {
    for await (const { name, data } of events('/v1/steering/sweep', traceBody(), stopTrace.signal)) {
      if (name === 'start') {
        result.head = data;
        // At z the third axis is heads.
        result.along = data.heads ?? data.positions;
        result.grid = data.layers.map(() => result.along.map(() => null));
        showTrace();
      } else if (name === 'cell') {
        const r = result.head.layers.indexOf(data.layer);
        result.grid[r][result.along.indexOf(data.head ?? data.position)] = data.value;
        if (performance.now() - drawn > 150) {
          showTrace();
          drawn = performance.now();
        }
      } else if (name === 'summary') {
        [result.grid] = data.grid;
        result.rate = data.cells_per_second;
      }
    }
  } finally {
    $('trace-stop').hidden = true;
    if (result.head) showTrace();
  }
  return `${result.head.cells} cells, ${shown(result.rate)} a second`;
}

function showTrace() {
  const { head, grid, along } = state.trace, words = !!head.tokens && !head.heads;
  const share = head.metric === 'recovered';
  heatMap($('trace-map'), { title: head.heads ? 'What a head gives for the clean prompt put in, ' +
    'one head at a time' : `The clean prompt's row put in, one at a time, at ${head.points[0]}`,
  rows: head.layers, columns: words ? head.tokens : along,
  values: grid.map((row) => row.map((value) => traceShown(value, head))), down: 'layer',
  across: head.heads ? 'head' : 'token', words, unit: share ? 'recovered' : 'nats of change',
  bound: share ? 1 : undefined });
  put($('trace-facts'), `${head.metric === 'recovered' ? 'answer' : head.metric} · ` +
    `prompt ${shown(head.corrupt)} · clean ${shown(head.clean)} nats · ` +
    `noise floor ${shown(head.noise_floor)}`);
  $('traced').hidden = false;
}

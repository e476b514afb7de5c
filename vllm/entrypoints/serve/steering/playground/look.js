// Look: tokens coloured by a direction, layers x tokens, and of a token what each layer would say.

// What the chosen source reads: {project, hooks, point, unit}, and how a layer's values are found.
function lookSource() {
  const [kind, name] = picked('look-source');
  if (kind === 'direction') {
    const { point, vectors } = state.directions[name];
    const layers = Object.keys(vectors).map(Number);
    const project = record(layers.map((l) => [l, packMatrix([unit(vectors[l])])]));
    return { project: { [point]: project }, hooks: { [point]: layers },
      unit: `along ${name}`, point };
  }
  if (kind === 'module') {
    const sites = sitesOf(state.modules[name]);
    if (!sites.length) throw new Error(`${name} has no vectors of the base tier`);
    const [[point]] = sites;
    const layers = sites.filter(([one]) => one === point).map(([, layer]) => layer);
    return { project: { modules: [name] }, hooks: { [point]: layers }, unit: `along ${name}`, point };
  }
  const { project, hooks } = tokensOnly();
  return { project, hooks, lens: true, unit: 'nats of entropy', point: 'post_block' };
}

function lookRequest(captures) {
  const steering = $('look-steered').checked ? steeringFields() : {};
  return generation(state.model, $('look-prompt').value,
    { ...settings(), maxTokens: Number($('look-tokens').value) }, { ...steering, ...captures, return_token_ids: true });
}

function readLens(payload) {
  return record(payload.map((entry) => [entry.layer, {
    ids: unpackRows(entry.top_ids), logprobs: unpackRows(entry.top_logprobs),
    entropy: unpack(entry.entropy) }]));
}

async function look() {
  const source = lookSource();
  const lens = $('look-lens').value;
  const layers = state.capture.lenses[lens]?.[source.point];
  if (lens && !layers) throw new Error(`the lens ${lens} does not read ${source.point}`);
  const asked = lookRequest({ capture: lookCapture(source.project, source.hooks,
    lens && { name: lens, hooks: { [source.point]: layers } }) });
  const answer = await post(asked.path, asked.body);
  const entries = payloadOf(answer.choices[0], 'inline[0]');
  const result = {
    asked, source, tokens: entries[0].tokens, positions: entries[0].positions,
    ids: entries[0].token_ids, prompt: answer.usage.prompt_tokens, details: {},
    layers: entries.map((entry) => entry.layer), scores: entries.map((entry) => [...unpack(entry)]),
    lens: lens ? readLens(payloadOf(answer.choices[0], 'inline[1]')) : null, at: 0,
  };
  if (source.lens) {
    if (!result.lens) throw new Error('choose a lens: it is what colours the tokens');
    result.layers = Object.keys(result.lens).map(Number);
    result.scores = result.layers.map((layer) => [...result.lens[layer].entropy]);
  }
  state.look = result;
  const own = state.directions[$('look-source').value.slice('direction '.length)]?.layer;
  const row = max(0, result.layers.indexOf(own ?? result.layers.at(-1)));
  result.at = strongestToken(result.scores[row].slice(0, result.prompt));
  showLook(row);
  await readToken(result.at);
  return `${result.prompt} tokens of the prompt, ${result.tokens.length - result.prompt} that ` +
    'were written and read again';
}

// Where most was read, the first token apart.
function strongestToken(scores) {
  const sizes = scores.map((value, i) => (i ? abs(value) : 0));
  return sizes.indexOf(max(...sizes));
}

function showLook(row) {
  const { tokens, layers, scores, source } = state.look;
  const sequential = !!source.lens;
  const bound = boundOfTokens(scores);
  const paint = (r) => {
    const most = boundOfTokens([scores[r]]);
    const line = tokenLine(tokens, { label: 'tokens, coloured', at: state.look.at,
      colours: scores[r].map((value) => colourOf(value, most, sequential, 0.5)),
      titles: scores[r].map((value) => `${shown(value)} ${source.unit}`),
      pick: (i) => { detail(i); }, hover: (i) => lensOf(i) });
    line.classList.add('coloured');
    put($('look-line'), make('figcaption', {},
      `Layer ${layers[r]}: what was read, token by token`), line);
  };
  paint(row);
  drawIn($('look-line'), () => paint(row));
  heatMap($('look-map'), {
    title: `Layers × tokens at ${source.point}`, rows: layers, columns: tokens, values: scores,
    down: 'layer', across: 'token', words: true, unit: source.unit, bound, sequential,
    mark: [row, state.look.at], hover: (r, c) => lensOf(c),
    pick: (r, c) => { row = r; paint(r); detail(c); } });
  $('looked').hidden = false;
}

// What each layer's row of one token is: its lens from what is there, and after `detail` its norm.
let reading = 0;
async function lensOf(i) {
  const { lens, tokens, positions, details } = state.look;
  const layers = Object.keys(lens ?? details[i] ?? {}).map(Number).sort((a, b) => b - a);
  if (!layers.length) return;
  const turn = ++reading;
  const rows = [];
  for (const layer of layers) {
    const one = lens?.[layer];
    const texts = one ? await textsOf([...one.ids[i]]) : [];
    rows.push(make('tr', make('th', { scope: 'row' }, String(layer)),
      make('td', shown(details[i]?.[layer]?.norm)),
      make('td', shown(details[i]?.[layer]?.cosine)),
      make('td.said-next', ...texts.flatMap((text, k) =>
        [make('span.token', text.replace(/\n/g, '↵') || '∅'),
          make('small', ` ${exp(one.logprobs[i][k]).toFixed(2)} `)])),
      make('td', one ? shown(one.entropy[i]) : '–')));
  }
  // The cursor may have moved on.
  if (turn !== reading) return;
  const head = ['layer', 'norm', 'cosine', 'would say next, with p', 'nats'];
  put($('look-detail'), make('figcaption', 'The row of “',
    make('code', tokens[i]), `” at position ${positions[i]}`),
  make('table', make('thead', make('tr', ...head.map((text) => make('th', text)))),
    make('tbody', ...rows)));
}

const detail = (i) => working($('look'), () => readToken(i));

// The lens of a token at once, and again with the norms when they are there.
async function readToken(i) {
  state.look.at = i;
  await Promise.all([lensOf(i), normsOf(i)]);
  await lensOf(i);
}

// Norms and cosines of one token's rows: the request again, as far as that token, with these rows.
async function normsOf(i) {
  const { asked, source, ids, positions, prompt, details, layers, scores } = state.look;
  if (details[i]) return;
  const written = max(0, i + 1 - prompt);
  const answer = await post(asked.path, { ...asked.body, max_tokens: written + 1, capture: {
    inline: { hooks: { [source.point]: 'all' }, positions: [positions[i]] } } });
  const [again] = answer.choices;
  if (again.token_ids.slice(0, written).join() !== ids.slice(prompt, i + 1).join()) {
    throw new Error('asked again, the model wrote something else: set the temperature to 0');
  }
  details[i] = record(payloadOf(again).map((entry) => {
    const long = norm(unpackRows(entry)[0]), score = scores[layers.indexOf(entry.layer)]?.[i];
    const along = !source.lens && score !== undefined;
    return [entry.layer, { norm: long, cosine: along ? score / long : null }];
  }));
}

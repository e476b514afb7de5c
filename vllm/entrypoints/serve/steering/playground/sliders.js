// The sliders of the first view: one for each direction and module, which answers when it is let go.

const MOST_SLIDERS = 12;

const termOf = (source, name) =>
  state.terms.find((one) => one.on && one.source === source && one.name === name);

// Answers one after the other; a later wish ends what runs.
let wishes = 0, answering = Promise.resolve();
function wish(work) {
  const mine = wishes += 1;
  stops.stop?.abort();
  answering = answering.then(() => mine === wishes && working($('compare'), work));
  return answering;
}

const answer = () => wish(compare);

// The kind and name of the slider that was moved last.
let lastMoved = null;

function sliderRow({ value, text }) {
  const [source, name] = parted(value), term = termOf(source, name);
  const number = term?.number ?? 0, shows = make('output', String(number));
  const slider = make('input', { type: 'range', min: '-4', max: '4', step: '0.25',
    value: String(number), 'aria-label': `strength of ${name}` });
  on(slider, 'input', () => {
    const moved = termOf(source, name) ?? newTerm(source, name);
    moved.number = Number(slider.value);
    lastMoved = [source, name];
    put(shows, String(moved.number));
    showTermList();
  });
  on(slider, 'change', answer);
  return make('li', make('label.slide', make('span', text,
    term && term.op !== 'add' ? `: ${term.op}` : ''), slider, shows));
}

function showSliders() {
  const rows = sourcesOf().slice(0, MOST_SLIDERS).map(sliderRow);
  const name = $('direction-name').value;
  const hint = !can.steer() ? ['Sliders are off: ', make('code', '--enable-steering')]
    : ['No direction yet. ', can.capture() ? button(`Find “${name}”`, () => working($('find'), find))
      : make('code', '--steering-modules NAME=PATH')];
  put($('sliders'), ...(can.steer() && rows.length ? rows : [make('li.quiet', {}, ...hint)]));
}

// Steer: what acts, as a list of terms; rules as lights; the request as text.

const sourcesOf = () => [
  ...Object.keys(state.directions).map((name) => ({ value: `direction ${name}`, text: name })),
  ...Object.keys(state.modules).map((name) => ({ value: `module ${name}`, text: `module ${name}` })),
];

// Of "direction happy": its kind and its name.
function parted(value) {
  const space = value.indexOf(' ');
  return space < 0 ? [value, ''] : [value.slice(0, space), value.slice(space + 1)];
}

const picked = (id) => parted($(id).value);

const settings = () => ({
  chat: $('chat').checked, maxTokens: Number($('max-tokens').value),
  temperature: Number($('temperature').value), seed: Number($('seed').value),
});

const steeringFields = () => steeringOf(state.terms, state.directions, state.shape?.num_layers);

// The terms that act, in a line.
const termsLine = () => state.terms.filter((one) => one.on).map((one) =>
  (one.source === 'head' ? `head ${one.name} × ${one.number}` : `${one.name} ${one.number}`))
  .join(', ');

const termFor = (source, name) => ({ source, name, op: 'add', number: 1, second: null,
  layers: state.directions[name]?.acts ?? String(state.directions[name]?.layer ?? 0), phase: 'all', positions: null, on: true });

function newTerm(source, name) {
  const term = termFor(source, name);
  state.terms.push(term);
  return term;
}

function addTerm(source, name) {
  newTerm(source, name);
  showTerms();
  $('terms').lastElementChild?.querySelector('input[type=range]')?.focus();
}

function addRule(source, name) {
  const [point, layer] = source === 'module' ? sitesOf(state.modules[name])[0] ?? ['post_block', 0]
    : [state.directions[name].point, state.directions[name].layer];
  const taken = state.rules.map((rule) => rule.label);
  let label = name.replace(/[^\w.-]+/g, '_').slice(0, 60);
  while (taken.includes(label)) label += '-2';
  state.rules.push({ source, name, label, point, layer, threshold: 0, below: false, then: 'flag',
    on: true });
  showTerms();
}

function showSources() {
  const sources = sourcesOf();
  showPresets();
  for (const id of ['term-source', 'rule-source', 'look-source']) {
    refill($(id), sources.length ? sources : [{ value: '', text: 'find a direction first' }]);
  }
  $('add-term').disabled = !sources.length || !can.steer();
  $('add-rule').disabled = !sources.length || !can.capture();
  const look = $('look-source');
  if (can.lenses().length) {
    refill(look, [...sources, { value: 'entropy', text: 'entropy under the lens' }]);
  }
  if (look.dataset.wanted) look.value = look.dataset.wanted;
  if (!look.value) look.selectedIndex = 0;
  showTerms();
}

function numberBox(label, value, set, attributes = {}) {
  const box = make('input', { type: 'number', step: 'any', value: value === null ? '' : String(value),
    'aria-label': label, ...attributes });
  on(box, 'input', () => set(box.value === '' ? null : Number(box.value)));
  return make('label', label, box);
}

// Buttons that put it in and out of use, and away.
function standing(list, i) {
  const one = list[i];
  return [make('label.check', make('input', { type: 'checkbox', checked: one.on,
    'aria-label': `${one.name} is on`,
    onchange: (e) => { one.on = e.target.checked; showSliders(); } }), 'on'),
  button('Remove', () => { list.splice(i, 1); showTerms(); })];
}

function termRow(term, i) {
  const source = SOURCES[term.source], { ops: whole } = source;
  const op = whole ? OPERATIONS[term.op] : source;
  const slider = make('input', { type: 'range', min: '-4', max: '4', step: '0.05',
    value: String(term.number), 'aria-label': `${op.number} of ${term.name}` });
  const box = numberBox(op.number, term.number, (value) => {
    term.number = value;
    slider.value = String(value ?? 0);
    showSliders();
  });
  on(slider, 'input', () => {
    term.number = Number(slider.value);
    box.querySelector('input').value = slider.value;
    showSliders();
  });
  const ops = Object.keys(OPERATIONS).map((value) => ({ value,
    off: can.family(value) ? null : `--steering-families ${value} turns it on` }));
  const layers = make('input', { value: term.layers, size: 6, 'aria-label': 'layers',
    oninput: (e) => { term.layers = e.target.value; } });
  const positions = make('div.wide');
  return make('li', make('strong', term.name), source.says, slider, box,
    op.second ? numberBox(op.second, term.second, (v) => { term.second = v; }) : null,
    ...(whole ? [choice('operation', ops, term.op, (v) => { term.op = v; showTerms(); }),
      make('label', 'layers', layers),
      choice('on', Object.keys(PHASES), term.phase, (v) => { term.phase = v; }),
      button(term.positions?.length ? `${term.positions.length} tokens` : 'all tokens',
        () => working($('steer'), () => pickPositions(term, positions)),
        { title: 'choose tokens of the first prompt', disabled: !can.capture() })] : []),
    ...standing(state.terms, i),
    make('small.quiet.wide', op.means), positions);
}

function ruleRow(rule, i) {
  return make('li', make('span.lamp'), make('strong', rule.label),
    make('span', `${rule.point} ${rule.layer}`),
    numberBox('threshold', rule.threshold, (value) => { rule.threshold = value ?? 0; }),
    make('label.check', make('input', { type: 'checkbox', checked: rule.below,
      onchange: (e) => { rule.below = e.target.checked; } }), 'below'),
    choice('then', ['flag', 'stop'], rule.then, (v) => { rule.then = v; }),
    ...standing(state.rules, i));
}

function showTermList() {
  put($('terms'), ...state.terms.map(termRow));
  if (state.heads?.pattern) showAblate();
}

function showTerms() {
  showTermList();
  put($('rules'), ...state.rules.map(ruleRow));
  showSliders();
}

// The tokens of a prompt as the model gets it: their texts, ids and number.
async function promptTokens(prompt) {
  const [[entry]] = await captured(generation(state.model, prompt, { ...settings(), maxTokens: 1 },
    { capture: { inline: tokensOnly('all_prompt') } }), 'inline');
  return entry.tokens;
}

async function pickPositions(term, place) {
  const prompt = lines($('prompts').value)[0];
  if (!prompt) throw new Error('Steer needs a prompt, whose tokens are shown here');
  const tokens = await promptTokens(prompt);
  const chosen = new Set(term.positions ?? []);
  put(place, tokenLine(tokens, { chosen, label: 'positions of the prompt',
    pick: (i, span) => {
      if (!chosen.delete(i)) chosen.add(i);
      span.classList.toggle('chosen', chosen.has(i));
      span.setAttribute('aria-selected', chosen.has(i));
      term.positions = [...chosen].sort((a, b) => a - b);
    } }), make('small.quiet', {},
    'Positions count in every prompt; none means all.'));
  place.querySelector('.tokens').focus();
}

function showCopy(kind) {
  const prompt = lines($('prompts').value)[0] ?? '';
  const asked = generation(state.model, prompt, settings(),
    { ...steeringFields(), ...rulesOf(state.rules, state.directions) });
  const text = COPIES[kind](location.origin + base, asked);
  put($('copied'), text);
  $('copied').hidden = false;
  return copyText(text);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return 'copied';
  } catch {
    return 'shown above; the browser forbids copying';
  }
}

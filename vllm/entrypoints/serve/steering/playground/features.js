// Features: what is active at each token under a sparse autoencoder, and the answer with one set.

const TOP_FEATURES = 32, MOST_LABELS = 1 << 23;

let labels = {}, stopFeature = null;

// A file of labels is somebody's text: {"number of a feature": "label"}, all else is left out.
async function readLabels() {
  const [file] = $('sae-labels').files;
  if (!file) return '';
  if (file.size > MOST_LABELS) throw new Error('the file of labels has more than 8 MiB');
  let said;
  try {
    said = JSON.parse(await file.text());
  } catch {
    throw new Error('the file of labels is no JSON');
  }
  const known = pairs(said ?? {}).filter(([id, text]) => /^\d+$/.test(id) && typeof text === 'string');
  if (!known.length) throw new Error('the file has no labels: {"1234": "cooking"} has one');
  labels = record(known.map(([id, text]) => [id, text.slice(0, 200)]));
  if (state.sae) showFeatures();
  return `${known.length} labels`;
}

async function readFeatures() {
  const name = $('sae-name').value;
  const asked = lookRequest({ capture: { inline: [{ positions: 'all', tokens: true,
    features: { name, top: TOP_FEATURES } }] } });
  const answer = await post(asked.path, asked.body);
  const [entry] = payloadOf(answer.choices[0], 'inline[0]');
  const values = unpackRows(entry.top_values);
  const prompt = answer.usage.prompt_tokens;
  state.sae = { name, asked, tokens: entry.tokens, active: [...unpack(entry.active)],
    tops: unpackRows(entry.top_ids).map((ids, i) => [...ids].map((id, k) => [id, values[i][k]])
      .filter(([id]) => id >= 0)), at: prompt - 1, chosen: null };
  put($('sae-one'));
  put($('sae-answers'));
  showFeatures();
  return `${prompt} tokens of the prompt, ${entry.tokens.length - prompt} of the answer`;
}

// The activation of a feature at each token, null where others are more active.
const activations = (chosen) => state.sae.tops.map((top) =>
  top.find(([id]) => id === chosen)?.[1] ?? null);

function showFeatures() {
  const { tokens, tops, at, chosen } = state.sae;
  $('sae-found').hidden = false;
  showTop(at);
  const mine = chosen ?? tops[at][0]?.[0], found = activations(mine);
  const bound = boundOf(found);
  drawIn($('sae-line'), () => put($('sae-line'),
    make('figcaption', `Feature ${mine ?? '–'}, where it is among a token's ${TOP_FEATURES} most active`),
    tokenLine(tokens, { label: 'tokens, coloured by a feature', at,
      colours: found.map((value) => value && colourOf(value, bound, true, 0.5)),
      titles: found.map((value) => (value ? shown(value) : '')),
      hover: (i) => showTop(i), pick: (i) => { state.sae.at = i; showTop(i); } })));
}

function showTop(i) {
  const { tokens, tops, active, chosen } = state.sae;
  const most = tops[i][0]?.[1] ?? 1;
  put($('sae-top'), make('figcaption', 'Most active of ', String(active[i]), ' at “',
    make('code', tokens[i]), '”'),
  make('table', make('tbody', ...tops[i].slice(0, 12).map(([id, value]) => {
    const bar = make('span.amount');
    bar.style.width = `${round(100 * value / most)}%`;
    return make('tr', make('td', button(String(id), () => chooseFeature(id, i),
      { 'aria-pressed': String(id === chosen), title: 'set this feature' })),
    make('td.said-next', labels[id] ?? '', bar), make('td', shown(value)));
  }))));
}

// A slider for one feature, which answers when it is let go.
function chooseFeature(id, i) {
  Object.assign(state.sae, { chosen: id, at: i });
  showFeatures();
  const most = max(...activations(id));
  let phase = 'answer';
  const slider = make('input', { type: 'range', min: '0', max: String(4 * most), step: 'any',
    value: String(most), 'aria-label': `activation of feature ${id}` });
  const said = make('output.reading');
  const say = () => put(said, `set to ${shown(Number(slider.value))}; most here ${shown(most)}`);
  const go = () => working($('sae'), () => setFeature(id, Number(slider.value), phase));
  on(slider, 'input', say);
  on(slider, 'change', go);
  const able = can.family('feature');
  slider.disabled = !able;
  say();
  put($('sae-one'), make('strong', `Feature ${id}`), labels[id] ? `: ${labels[id]}` : '',
    make('div.row', slider, choice('on', Object.keys(PHASES), phase, (v) => { phase = v; go(); })),
    said, able ? '' : make('p.off', make('code', '--enable-steering --steering-families feature'),
      ' turns the slider on.'));
  slider.focus();
}

async function setFeature(id, value, phase) {
  stopFeature?.abort();
  stopFeature = new AbortController();
  const { signal } = stopFeature, { name } = state.sae;
  const fields = $('look-steered').checked ? steeringFields() : {};
  const op = { op: 'feature', features: name, id, value, positions: PHASES[phase][1] };
  const { pair, row, grow } = pairRow($('look-prompt').value);
  state.sae.answers = pair;
  pair.steered.name = `feature ${id} set to ${shown(value)}`;
  put($('sae-answers'), row);
  await Promise.all([stream(pair.prompt, fields, pair.plain, grow, signal),
    stream(pair.prompt, { ...fields, steering: [...(fields.steering ?? []), op] }, pair.steered,
      grow, signal)]);
  return pair.differs < 0 ? 'the answers are the same' : '';
}

// Attention: how much each head looks at chosen tokens, the pattern of one head, the answer without.

const STRONGEST = 6;

let stopHead = null, markHead = null;

const attentionRequest = (asked) => generation(state.model, $('look-prompt').value,
  { ...settings(), maxTokens: 1 }, {
    ...($('look-steered').checked ? steeringFields() : {}),
    capture: { inline: [{ attention: asked }] } });

// `marked`: the looked-at tokens, whose attention is added up. Without, the most that one token gets
// of all but the first, which takes what heads have to spare, and the last, which looks.
async function heads(marked = null) {
  const tokens = await promptTokens($('look-prompt').value);
  const others = tokens.map((_, i) => i).slice(1, -1);
  const keys = marked ?? (others.length ? others : [0]);
  const give = marked ? 'mass' : 'peak';
  const [entries] = await captured(attentionRequest({ heads: 'all', queries: 'last_prompt',
    keys: { chosen: keys }, give: [give] }), 'inline[0]');
  const mass = entries.map((entry) => [...unpack(entry[give])]);
  state.heads = { keys, marked: !!marked, tokens, mass, layers: entries.map((one) => one.layer),
    heads: entries.map((entry) => entry.heads), top: strongest(mass), pattern: null };
  put($('head-answers'));
  showHeads();
  await pattern(...state.heads.top[0]);
}

// The [row, column] of the largest numbers, largest first.
const strongest = (mass) => mass.flatMap((row, r) => row.map((value, c) => [value, r, c]))
  .sort((a, b) => b[0] - a[0]).slice(0, STRONGEST).map(([, r, c]) => [r, c]);

function showHeads() {
  const { keys, marked, tokens, layers, heads: names, mass, top } = state.heads;
  const chosen = new Set(marked ? keys : []);
  const line = tokenLine(tokens, { chosen: new Set(keys), label: 'keys', at: keys[0], pick: (i) => {
    if (!chosen.delete(i)) chosen.add(i);
    if (chosen.size) working($('attention'), () => heads([...chosen].sort((a, b) => a - b)));
  } });
  put($('head-keys'),
    make('figcaption', 'Looked at: the marked tokens. Pick one to see who looks at it.'), line);
  put($('head-top'), 'Strongest, layer.head:', ...top.map(([r, c]) =>
    button(`${layers[r]}.${names[r][c]} · ${shown(mass[r][c])}`,
      () => working($('attention'), () => pattern(r, c)))));
  const most = max(...mass.map((row) => row.length));
  markHead = heatMap($('head-map'), {
    title: `${marked ? 'What' : 'The most that'} “${oneLine(tokens.at(-1))}” gives to ` +
      (marked ? 'the marked tokens' : 'one of the marked tokens'), rows: layers,
    columns: Array.from({ length: most }, (_, h) => h), values: mass, down: 'layer',
    across: 'head', unit: 'of its attention', sequential: true,
    pick: (r, c) => working($('attention'), () => pattern(r, c)) });
  $('headed').hidden = false;
}

async function pattern(r, c) {
  const { layers, heads: names, tokens, top } = state.heads;
  const layer = layers[r], head = names[r][c];
  const [[entry]] = await captured(attentionRequest(
    { heads: { [layer]: [head] }, queries: 'all_prompt', give: ['weights'] }), 'inline[0]');
  const rows = unpackRows(entry.weights).map((row) => [...row]);
  const values = rows.map((row, q) => row.map((value, k) => (k > q ? null : value)));
  state.heads.pattern = { layer, head, values };
  markHead([r, c]);
  [...$('head-top').querySelectorAll('button')].forEach((one, i) =>
    one.setAttribute('aria-pressed', top[i][0] === r && top[i][1] === c));
  const bound = boundOfTokens(values);
  const shade = (q) => put($('head-line'),
    make('figcaption', `Where “${oneLine(tokens[q])}” looks, head ${head} of layer ${layer}`),
    tokenLine(tokens, { colours: values[q].map((v) => v && colourOf(v, bound, true, 0.5)),
      titles: values[q].map((v) => v === null ? '' : shown(v)) }));
  drawIn($('head-line'), () => shade(values.length - 1));
  heatMap($('head-pattern'), { title: `Head ${head} of layer ${layer}`, rows: tokens,
    columns: tokens, values, down: 'query', across: 'key', words: true, top: true,
    sequential: true, bound, unit: 'of attention', hover: shade, pick: shade });
  showAblate();
}

const HEADS_FLAG = '--steering-points pre_attn post_attn post_block z --steering-families add scale';
const headTerm = ({ layer, head }) => termOf('head', `${layer}.${head}`);

function showAblate() {
  const { layer, head } = state.heads.pattern, out = !!headTerm(state.heads.pattern);
  put($('ablate'), `${out ? 'Put back' : 'Ablate'} head ${head} of layer ${layer}`);
  $('ablate').setAttribute('aria-pressed', out);
  $('ablate').disabled = !can.heads();
  put($('ablate-off'), ...(can.heads() ? [] : ['Off on this server. ', make('code', HEADS_FLAG),
    ' turns it on.']));
}

// Take the head out with a term, or put it back; then answer plain, and with all terms.
async function ablate() {
  const { layer, head } = state.heads.pattern, term = headTerm({ layer, head });
  if (term) state.terms = state.terms.filter((one) => one !== term);
  else newTerm('head', `${layer}.${head}`).number = 0;
  showTerms();
  showAblate();
  stopHead?.abort();
  stopHead = new AbortController();
  const { signal } = stopHead, { pair, row, grow } = pairRow($('look-prompt').value);
  state.heads.answers = pair;
  pair.steered.name = termsLine() || 'no term';
  put($('head-answers'), row);
  await Promise.all([stream(pair.prompt, {}, pair.plain, grow, signal),
    stream(pair.prompt, steeringFields(), pair.steered, grow, signal)]);
  return pair.differs < 0 ? 'the answers are the same' : '';
}

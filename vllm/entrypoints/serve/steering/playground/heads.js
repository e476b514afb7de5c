// Attention: how much each head looks at chosen tokens, and the pattern of one head.

const attentionRequest = (asked, extra = []) => generation(state.model, $('look-prompt').value,
  { ...settings(), maxTokens: 1 }, {
    ...($('look-steered').checked ? steeringFields() : {}),
    capture: { inline: [{ attention: asked }, ...extra] } });

async function heads(keys = [0]) {
  const mass = { heads: 'all', queries: 'last_prompt', keys: { chosen: keys }, give: ['mass'] };
  const [entries, [{ tokens }]] = await captured(
    attentionRequest(mass, [tokensOnly('all_prompt')]), 'inline[0]', 'inline[1]');
  state.heads = { keys, tokens, layers: entries.map((entry) => entry.layer),
    heads: entries.map((entry) => entry.heads), mass: entries.map((entry) => [...unpack(entry.mass)]),
    pattern: null };
  showHeads();
}

function showHeads() {
  const { keys, tokens, layers, mass } = state.heads;
  const chosen = new Set(keys);
  const line = tokenLine(tokens, { chosen, label: 'keys', at: keys[0], pick: (i) => {
    if (!chosen.delete(i)) chosen.add(i);
    if (chosen.size) working($('attention'), () => heads([...chosen].sort((a, b) => a - b)));
  } });
  put($('head-keys'), 
    make('figcaption', 'Looked at: the marked tokens'), line);
  const most = max(...mass.map((row) => row.length));
  heatMap($('head-map'), {
    title: `What the last token gives to ${keys.map((k) => `“${clipped(tokens[k] ?? '', 12)}”`)
      .join(', ')}`, rows: layers, columns: Array.from({ length: most }, (_, h) => h),
    values: mass, down: 'layer', across: 'head', unit: 'of its attention', sequential: true,
    bound: 1, pick: (r, c) => working($('attention'), () => pattern(r, c)) });
  $('headed').hidden = false;
}

async function pattern(r, c) {
  const { layers, heads: names, tokens } = state.heads;
  const layer = layers[r], head = names[r][c];
  const [[entry]] = await captured(attentionRequest(
    { heads: { [layer]: [head] }, queries: 'all_prompt', give: ['weights'] }), 'inline[0]');
  const rows = unpackRows(entry.weights).map((row) => [...row]);
  const values = rows.map((row, q) => row.map((value, k) => (k > q ? null : value)));
  state.heads.pattern = { layer, head, values };
  const shade = (q) => put($('head-line'), 
    make('figcaption', `Where “${clipped(tokens[q], 12)}” looks, head ${head} of layer ${layer}`),
    tokenLine(tokens, { colours: values[q].map((v) => v && colourOf(v, 1, true, 0.5)),
      titles: values[q].map((v) => v === null ? '' : shown(v)) }));
  drawIn($('head-line'), () => shade(values.length - 1));
  heatMap($('head-pattern'), { title: `Head ${head} of layer ${layer}`, rows: tokens,
    columns: tokens, values, down: 'query', across: 'key', words: true, top: true,
    sequential: true, bound: 1, unit: 'of attention', hover: shade, pick: shade });
}

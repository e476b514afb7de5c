// Find: two lists of texts -> a direction for each layer, and how well each tells them apart.

// Texts of one request: what is captured for all of them has one limit.
const BATCH = 16;

// The rows of texts, [texts] of {layer: row}.
async function rowsOf(texts, point, read) {
  const found = [];
  const capture = { inline: { hooks: { [point]: 'all' },
    ...(read === 'mean' ? { positions: 'all_prompt', reduce: 'mean' }
      : { positions: 'last_prompt' }) } };
  for (let i = 0; i < texts.length; i += BATCH) {
    const answer = await post('/v1/completions', { model: state.model,
      prompt: texts.slice(i, i + BATCH), max_tokens: 1, temperature: 0, capture });
    for (const one of answer.choices.sort((a, b) => a.index - b.index)) {
      found.push(record(payloadOf(one).map((entry) =>
        [entry.layer, unpackRows(entry)[0]])));
    }
  }
  return found;
}

async function find() {
  const examples = lines($('examples').value), against = lines($('against').value);
  if (!examples.length || !against.length) throw new Error('both lists need a text');
  const name = $('direction-name').value.trim() || 'direction';
  const point = $('find-point').value;
  const rows = await rowsOf([...examples, ...against], point, $('find-read').value);
  const layers = Object.keys(rows[0]).map(Number).sort((a, b) => a - b);
  const results = {};
  for (const layer of layers) {
    const all = rows.map((row) => row[layer]);
    results[layer] = found(all.slice(0, examples.length), all.slice(examples.length));
  }
  const rank = (layer) => results[layer].held ?? results[layer].auroc;
  const best = max(...layers.map(rank));
  // Of layers that are as good the middle one: the first ones know words, the last ones the next.
  const good = layers.filter((layer) => rank(layer) === best);
  const layer = good[floor(good.length / 2)];
  state.find = { name, point, layers, results, examples, against };
  state.directions[name] = { point, layer,
    vectors: record(layers.map((l) => [l, results[l].vector])) };
  showFound();
  showSources();
}

function showFound() {
  const { name, layers, results, examples, against } = state.find;
  const direction = state.directions[name];
  const detail = () => {
    const one = results[direction.layer];
    strip($('find-strip'), `Layer ${direction.layer}: where each text lies along “${name}”`, [
      { name: 'examples', values: one.scores.examples, texts: examples },
      { name: 'against', values: one.scores.against, texts: against },
    ], 'component of the row');
    put($('find-numbers'), `layer ${direction.layer} · AUROC ${shown(one.auroc)} on ` +
      `its own texts, ${shown(one.held)} where each is left out · length ${shown(one.norm)}, ` +
      `rows ${shown(one.stream)}`);
  };
  layerBars($('find-bars'), 'How well each layer tells the lists apart (AUROC)', layers,
    layers.map((l) => results[l].held), layers.map((l) => results[l].auroc),
    ['each text left out', 'all texts'], layers.indexOf(direction.layer), (i) => {
      direction.layer = layers[i];
      detail();
      showTerms();
    });
  detail();
  // A control vector acts on what blocks return, and has no other point.
  $('download-gguf').disabled = state.find.point !== 'post_block';
  $('found').hidden = false;
}

function chosenVectors() {
  const { point, layer, vectors } = state.directions[state.find.name];
  const layers = $('all-layers').checked ? state.find.layers : [layer];
  return { point, layers, vectors: layers.map((l) => vectors[l]) };
}

async function saveModule() {
  const { point, layers, vectors } = chosenVectors();
  const { name } = state.find;
  await post('/v1/steering/modules',
    { name, vectors: { [point]: { ...packMatrix(vectors), layers } } });
  await refresh();
  return `module ${name} is registered until the server ends`;
}

// The found direction as a file of a kind, "safetensors" or "gguf".
function foundFile(kind) {
  const { point, layers, vectors } = chosenVectors();
  const named = (prefix) => layers.map((layer, i) => [`${prefix}.${layer}`, vectors[i]]);
  if (kind === 'gguf') return ggufFile(named('direction'), state.model);
  return safetensorsFile(named(`base.${point}`),
    { steering_format: '1', model_hint: state.model, hidden_size: String(vectors[0].length) });
}

const downloadFound = (kind) => download(foundFile(kind),
  `${state.find.name.replace(/[^\w.-]+/g, '_')}.${kind}`);

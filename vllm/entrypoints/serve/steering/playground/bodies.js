// The bodies of requests, made of what was chosen: what runs is what "Copy as" copies.

const OPERATIONS = {
  add: { number: 'scale', means: '1 goes from between the classes to the examples' },
  norm_match: { number: 'scale', means: 'in lengths of the row' },
  ablate: { number: 'strength', means: '1 takes all of the direction out' },
  clamp: { number: 'lo', second: 'hi', means: 'the component is kept from … to …' },
  pin: { number: 'value', means: 'the component is set to this' },
};
const PHASES = {
  all: ['steering_vectors', 'all'],
  prompt: ['prefill_steering_vectors', 'all_prompt'],
  answer: ['decode_steering_vectors', 'all_generated'],
};

/* What a term can be of. number: the name of its number; means: what that does; says: beside the
   term's name; ops: whether it has operations, layers and positions to choose.
   act(term, fields, directions, numLayers) puts it into a request's fields. */
const SOURCES = {
  direction: { says: '', ops: true, act: actDirection },
  module: { number: 'scale', means: 'as registered', says: ' module',
    act: ({ name, number }, fields) => (fields.steering_modules ??= []).push([name, number]) },
  head: { number: 'factor', means: 'layer.head: 0 takes it out, 1 leaves it', says: ' head',
    act: ({ name, number }, fields) => {
      const [layer, head] = name.split('.');
      (fields.steering ??= []).push({ op: 'scale', point: 'z', heads: { [layer]: [Number(head)] },
        factor: number, positions: 'all' });
    } },
};

// The fields that steer, of terms {source, name, op, number, second, layers, phase, positions, on}.
function steeringOf(terms, directions, numLayers) {
  const fields = {};
  for (const term of terms.filter((one) => one.on)) {
    SOURCES[term.source].act(term, fields, directions, numLayers);
  }
  return fields;
}

/* Vectors of a phase are summed where a term stands alone at its layer; a second one at the same
   place is an operation, which the server adds as well. */
function actDirection(term, fields, directions, numLayers) {
  const { point, vectors } = directions[term.name];
  const [field, selector] = PHASES[term.phase];
  const positions = term.positions?.length ? term.positions : null;
  for (const layer of layersOf(term.layers, numLayers)) {
    const vector = vectors[layer];
    if (!vector) throw new Error(`${term.name} has no direction at layer ${layer}`);
    const at = fields[field]?.[point];
    if (term.op === 'add' && !at?.[layer]) {
      ((fields[field] ??= {})[point] ??= {})[layer] = {
        vector: pack(vector), scale: term.number, ...(positions && { positions }) };
      continue;
    }
    const op = { op: term.op, point, layers: [layer],
      [term.op === 'add' ? 'vector' : 'direction']: pack(vector) };
    const { number, second } = OPERATIONS[term.op];
    if (term.number !== null) op[number] = term.number;
    if (second && term.second !== null) op[second] = term.second;
    (fields.steering ??= []).push({ ...op, positions: positions ?? selector });
  }
}

function rulesOf(rules, directions) {
  const asked = rules.filter((one) => one.on).map((rule) => {
    const probe = rule.source === 'module' ? { module: rule.name }
      : { probe: pack(unit(probeOf(rule, directions))) };
    const point = rule.source === 'module' ? rule.point : directions[rule.name].point;
    return { name: rule.label, point, layer: rule.layer, ...probe, threshold: rule.threshold,
      below: rule.below, then: rule.then };
  });
  return asked.length ? { rules: asked } : {};
}

function probeOf(rule, directions) {
  const vector = directions[rule.name].vectors[rule.layer];
  if (!vector) throw new Error(`${rule.name} has no direction at layer ${rule.layer}`);
  return vector;
}

/* A completion, or a chat of one turn, or of the messages that `prompt` is: {path, body}. */
function generation(model, prompt, settings, fields = {}) {
  const { maxTokens, temperature, seed } = settings, talk = Array.isArray(prompt);
  const chat = talk || settings.chat;
  const asked = !chat ? { prompt }
    : { messages: talk ? prompt : [{ role: 'user', content: prompt }] };
  return {
    path: chat ? '/v1/chat/completions' : '/v1/completions',
    body: { model, ...asked, max_tokens: maxTokens, temperature, seed, ...fields },
  };
}

/* The captures behind Look: scores of every token at `sites` ({point: [layers]}), with the tokens'
   texts, and what a lens reads there. Returns the value of "capture". */
function lookCapture(project, hooks, lens) {
  const captures = [{ hooks, positions: 'all', tokens: true, project }];
  if (lens) {
    captures.push({ hooks: lens.hooks, positions: 'all',
      lens: { name: lens.name, top_k: 5, entropy: true } });
  }
  return { inline: captures };
}

/* The capture of how long vectors are beside the rows that they meet; none where operations act,
   of which that is not known. */
function doseCapture(fields) {
  const { capture, modules, shape, steering } = state;
  const acting = [...(fields.steering_modules ?? []).map(([name]) => name),
    ...steering.default_steering_modules];
  const hooks = record(capture.points.filter((p) => p !== 'z' && shape.steering_points.includes(p))
    .map((p) => [p, 'all']));
  const asked = pairs(hooks).length && shape.lanes < 2 && !fields.steering &&
    !steering.ops.length && !acting.some((name) => modules[name]?.ops?.length);
  return asked ? { capture: { inline: { hooks, positions: 'all', dose: true } } } : {};
}

/* What a row is projected on to read nothing but the tokens: its first number. */
function firstNumber(hidden) {
  return packMatrix([Array.from({ length: hidden }, (_, i) => (i ? 0 : 1))]);
}

/* The capture that reads the tokens' texts at `positions`, and next to nothing more. */
function tokensOnly(positions) {
  const { shape, capture } = state;
  return { hooks: { [capture.points.find((p) => !'qkvz'.includes(p))]: [0] }, positions,
    tokens: true, project: firstNumber(shape.hidden_size) };
}

/* Ask, and return what the first choice captured. */
const captured = async ({ path, body }, ...names) => {
  const [choice] = (await post(path, body)).choices;
  return names.map((name) => payloadOf(choice, name));
};

function payloadOf(choice, name = 'inline') {
  const result = choice.capture_results?.[name];
  if (!result) throw new Error('the answer has no captured rows');
  if (result.error) throw new Error(`capture: ${result.error}`);
  return result.payload;
}

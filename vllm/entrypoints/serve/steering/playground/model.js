// Model: what is there, what is on, and for what is off the flag that turns it on.

const state = {
  model: '', shape: null, steering: null, capture: null, modules: {}, directions: Object.create(null), terms: [],
  rules: [], chat: { turns: [], at: -1, editing: null }, find: null, compare: [], look: null, heads: null, sae: null, trace: null,
};

async function readServer() {
  const models = await get('/v1/models');
  state.model = models.data[0].id;
  state.capture = await get('/v1/capture');
  state.steering = await get('/v1/steering');
  try {
    state.shape = await get('/v1/steering/layers');
  } catch (error) {
    // Nothing is enabled: the panel says so.
    if (error.status !== 400) throw error;
    state.shape = null;
  }
  state.modules = (await get('/v1/steering/modules')).modules;
}

const can = {
  steer: () => !!state.steering?.enabled,
  capture: () => !!state.capture?.enabled && 'inline' in state.capture.consumers,
  family: (name) => can.steer() && state.shape.steering_families.includes(name),
  attention: () => can.capture() && ['q', 'z'].every((p) => state.capture.points.includes(p)),
  heads: () => can.family('scale') && state.shape.steering_points.includes('z'),
  train: () => can.steer() && state.steering.train,
  features: () => (can.capture() ? Object.keys(state.capture.features) : []),
  lenses: () => (can.capture() ? Object.keys(state.capture.lenses) : []),
};

// What can be off: its name, whether it is on, what it says when it is on, the flag.
function features() {
  const families = state.shape?.steering_families ?? [];
  const missing = Object.keys(OPERATIONS).filter((name) => !families.includes(name));
  const points = ['pre_attn', 'post_attn', 'post_block'];
  const steered = state.shape?.steering_points ?? [];
  return [
    ['Steering', can.steer(), steered.join(', '), '--enable-steering'],
    ['Operations', can.steer() && !missing.length, families.join(', '),
      `--steering-families ${[...families, ...missing].join(' ')}`],
    ['Capture', can.capture(), (state.capture.points ?? []).join(', '),
      '--capture-consumers inline'],
    ['Attention', can.attention(), 'weights of all heads',
      `--capture-points ${[...points, 'q', 'z'].join(' ')}`],
    ['Features', can.features().length > 0, can.features().join(', '),
      '--features NAME=PATH@POINT.LAYER'],
    ['Lenses', can.lenses().length > 0, can.lenses().join(', '), '--capture-lens logit'],
  ];
}

function showModel() {
  const { shape, steering, model } = state;
  put($('model-name'), model);
  document.title = `${model} · playground`;
  const facts = [['model', model]];
  if (shape) {
    facts.push(['layers', shape.num_layers], ['hidden size', shape.hidden_size],
      ['dtype', shape.dtype]);
    const heads = Object.values(shape.heads)[0];
    if (heads?.q) facts.push(['heads', `${heads.q[0]} × ${heads.q[1]}`]);
  }
  if (steering.enabled) {
    facts.push(['version', steering.version],
      ['slots in use', `${steering.slots.in_use} of ${steering.slots.size}`],
      ['rows in use', `${steering.rows.in_use} of ${steering.rows.size}`]);
  }
  put($('facts'), ...facts.map(([name, value]) =>
    make('div', make('dt', name), make('dd', String(value)))));
  put($('features'), ...features().map(([name, on, says, flag]) => make('tr', {},
    make('th', { scope: 'row' }, make('span', { class: on ? 'lamp on' : 'lamp' }), name),
    make('td', on ? says : says && can.steer() ? `${says} ` : 'off: ',
      on ? null : make('code', flag)))));
  const off = features().filter(([, on_]) => !on_).map(([name]) => name.toLowerCase());
  put($('model-line'), [...facts.slice(1, 4).map(([name, value]) => `${name} ${value}`),
    off.length ? `off: ${off.join(', ')}` : 'all is on'].join(' · '));
  const acting = [...Object.keys(steering.tiers ?? {}), ...(steering.ops ?? [])];
  put($('tiers'), acting.length ? `Global steering acts on every request: ${acting.join(', ')}` : '');
  showModules();
}

function showModules() {
  const defaults = state.steering.default_steering_modules ?? [];
  const rows = pairs(state.modules).map(([name, module]) => make('tr', {},
    make('th', { scope: 'row' }, name, defaults.includes(name) ? ' (acts on every request)' : ''),
    make('td', sitesOf(module).map(([point, layer, size]) =>
      `${point} ${layer}: ${shown(size)}`).slice(0, 6).join(' · ') || (module.ops ?? []).join(', ')),
    make('td', button('Delete', () => working($('model'), async () => {
        await remove(`/v1/steering/modules/${encodeURIComponent(name)}`);
        await refresh();
      })))));
  put($('modules'), ...(rows.length ? rows
    : [make('tr', make('td.quiet', 'No modules yet: Find makes one.'))]));
}

// The sites of a module's base vectors: [point, layer, norm].
function sitesOf(module) {
  return pairs(module.tiers?.base ?? {}).flatMap(([point, layers]) =>
    pairs(layers).map(([layer, size]) => [point, Number(layer), size]));
}

async function refresh() {
  await readServer();
  showModel();
  showSources();
}

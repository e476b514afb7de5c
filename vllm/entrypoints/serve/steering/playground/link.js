// The page's state as the fragment of a link, which browsers do not send to servers. No keys are in
// it, no answers but a chat's, no vector of more than MOST_BYTES. What a link says is put into fields that
// are there, and nothing is asked of the server until somebody presses a button.

const MOST_BYTES = 4096;
const MOST_LINK = 65536;

const linked = () => [...document.querySelectorAll(
  'main :is(input:not([type=file]), select, textarea)[id]')];

function asLink() {
  const fields = record(linked().map((one) =>
    [one.id, one.type === 'checkbox' ? one.checked : one.value]));
  const directions = {}, left = [];
  for (const [name, { point, layer, vectors, acts }] of pairs(state.directions)) {
    const vector = vectors[layer];
    // That of a file acts at all its layers.
    const only = !acts || Object.keys(vectors).length === 1;
    if (only && vector.length * 4 <= MOST_BYTES) {
      directions[name] = { point, layer, ...pack(vector) };
    } else left.push(name);
  }
  const { terms, rules } = state, chat = chatInLink();
  const small = JSON.stringify(chat).length <= MOST_CHAT;
  if (!small) left.push('the chat');
  const text = JSON.stringify({ v: 1, fields, terms, rules, directions, ...(small && { chat }) });
  const bytes = new TextEncoder().encode(text);
  const code = base64Of(bytes).replace(/\+/g, '-').replace(/\//g, '_').replace(/=+$/, '');
  return { url: `${location.origin}${location.pathname}#${code}`, code, left };
}

// What a fragment says, or null. Everything in it is somebody's text: only what has the form
// of our own state is taken.
function readLink(fragment) {
  if (fragment.length < 2 || fragment.length > MOST_LINK) return null;
  let said;
  try {
    const bytes = bytesOf(fragment.slice(1).replace(/-/g, '+').replace(/_/g, '/'));
    said = JSON.parse(new TextDecoder().decode(bytes));
  } catch {
    return null;
  }
  if (said?.v !== 1) return null;
  const entries = (value) => (value && typeof value === 'object' ? pairs(value) : []);
  const list = (value) => (Array.isArray(value) ? value.slice(0, 32) : []);
  const word = (value, among, other) => (among.includes(value) ? value : other);
  const text = (value) => (typeof value === 'string' ? value.slice(0, 200) : '');
  const number = (value, other = null) => (Number.isFinite(value) ? value : other);
  const directions = {};
  for (const [name, one] of entries(said.directions).slice(0, 32)) {
    try {
      const vector = unpack({ dtype: 'float32', data: String(one.data) });
      if (vector.length * 4 > MOST_BYTES || !Number.isSafeInteger(one.layer)) continue;
      if (!vector.every(Number.isFinite) || name === '__proto__') continue;
      directions[text(name)] = { point: text(one.point), layer: one.layer,
        vectors: { [one.layer]: vector } };
    } catch { /* no array: left out */ }
  }
  return {
    fields: record(entries(said.fields).filter(([, value]) =>
      ['string', 'boolean'].includes(typeof value))),
    directions,
    chat: readChat(said.chat),
    terms: list(said.terms).map((one) => ({
      source: word(one?.source, Object.keys(SOURCES), 'direction'), name: text(one?.name),
      op: word(one?.op, Object.keys(OPERATIONS), 'add'), number: number(one?.number, 0),
      second: number(one?.second), layers: text(one?.layers),
      phase: word(one?.phase, Object.keys(PHASES), 'all'), on: one?.on !== false,
      positions: Array.isArray(one?.positions)
        ? one.positions.filter(Number.isSafeInteger).slice(0, 4096) : null })),
    rules: list(said.rules).map((one) => ({
      source: word(one?.source, ['direction', 'module'], 'direction'), name: text(one?.name),
      label: text(one?.label), point: text(one?.point), layer: number(one?.layer, 0),
      threshold: number(one?.threshold, 0), below: one?.below === true,
      then: word(one?.then, ['flag', 'stop'], 'flag'), on: one?.on !== false })),
  };
}

function restore(said) {
  for (const one of linked()) {
    const value = said.fields[one.id];
    if (one.type === 'checkbox') one.checked = value === true;
    else if (typeof value === 'string') one.dataset.wanted = one.value = value;
  }
  const { hidden_size: hidden } = state.shape ?? {};
  for (const [name, one] of pairs(said.directions)) {
    if (one.vectors[one.layer].length === hidden) state.directions[name] = one;
  }
  const there = (one) => one.source !== 'direction' || one.name in state.directions;
  state.chat = said.chat;
  showTalk();
  state.terms = said.terms.filter(there);
  state.rules = said.rules.filter(there);
  return [...said.terms, ...said.rules].filter((one) => !there(one)).map((one) => one.name);
}

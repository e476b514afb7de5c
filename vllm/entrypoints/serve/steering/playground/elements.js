// Making elements. Text of models, modules and links becomes text nodes, never markup.

const $ = (id) => document.getElementById(id);

// make('p.quiet', {attributes}, ...children); attributes may be left out.
function make(what, ...rest) {
  const [tag, ...classes] = what.split('.'), node = document.createElement(tag);
  const attributes = rest[0]?.constructor === Object ? rest.shift() : {};
  for (const [name, value] of pairs(attributes)) {
    if (name.startsWith('on')) node[name] = value;
    else if (name in node && typeof value !== 'string') node[name] = value;
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.classList.add(...classes);
  if ('value' in attributes) node.value = attributes.value;
  node.append(...rest.filter((child) => child !== null && child !== undefined));
  return node;
}

const put = (node, ...children) => node.replaceChildren(...children);
const on = (node, kind, heard) => node.addEventListener(kind, heard);

const button = (text, onclick, attributes = {}) =>
  make('button', { type: 'button', onclick, ...attributes }, text);

// Fill a select with {value, text, off}; what was chosen stays if it still is among them.
function refill(select, options, chosen = select.value) {
  put(select, ...options.map(({ value, text = value, off }) =>
    make('option', { value, disabled: !!off, title: off ?? '' }, text)));
  if (options.some((one) => one.value === chosen)) select.value = chosen;
}

function choice(label, options, chosen, set) {
  const select = make('select', { onchange: () => set(select.value) });
  refill(select, options.map((one) => (one.value ? one : { value: one })), chosen);
  return make('label', label, select);
}

// What can be done about an error: words, and a button that does it.
function remedy({ status, message, param }, again) {
  const go = (text, id) => button(text, () => {
    const node = $(id);
    for (let at = node; at; at = at.parentElement) if ('open' in at) at.open = true;
    node.scrollIntoView({ block: 'center' });
    (node.matches('input, textarea') ? node : node.querySelector('input'))?.focus();
  });
  if (status === 401 || status === 403) {
    return ['Type the key, then ask again. ',
      go('Type the key', /steering/i.test(message) ? 'steering-key' : 'api-key')];
  }
  const field = FIELDS[param?.split('.')[0]];
  if (status === 400 && field) return ['Change it, then ask again. ', go('Go to it', field)];
  if (status && status < 500) return [];
  return ['What you typed is kept. Start the server again if it has ended. ',
    again && button('Try again', again)];
}

// Fields of requests, and where they are typed.
const FIELDS = { prompt: 'prompts', messages: 'prompts', max_tokens: 'max-tokens', seed: 'seed',
  temperature: 'temperature', steering_vectors: 'terms', prefill_steering_vectors: 'terms',
  decode_steering_vectors: 'terms', steering: 'terms', steering_modules: 'terms', rules: 'rules' };

function sayError(place, error, again) {
  // Most messages begin with the field that they are about.
  const parts = [error.message.replace(error.param, '')];
  if (error.param) parts.unshift(make('code', error.param));
  if (error.status) parts.push(make('small', ` HTTP ${error.status}`));
  const help = again && 'status' in error ? remedy(error, again) : [];
  put(place, make('p.error', { role: 'alert' }, ...parts),
    ...(help.length ? [make('p.quiet', ...help)] : []));
}

// Where a panel says what became of its work: behind its form, or at its end.
function saidIn(panel) {
  const there = panel.querySelector('.said');
  if (there) return there;
  const made = make('div.said', { 'aria-live': 'polite' }), form = panel.querySelector('form');
  if (form) form.after(made);
  else panel.append(made);
  return made;
}

// Do a panel's work: its button rests meanwhile, and what goes wrong is said there.
async function working(panel, work) {
  const place = saidIn(panel), buttons = panel.querySelectorAll('button.run');
  put(place, make('p.quiet', { role: 'status' }, 'asking …'));
  buttons.forEach((one) => { one.disabled = true; });
  panel.setAttribute('aria-busy', 'true');
  try {
    put(place, ...[await work()].filter(Boolean)
      .map((text) => make('p.quiet', { role: 'status' }, text)));
  } catch (error) {
    if (error.name === 'AbortError') put(place, make('p', 'stopped'));
    else sayError(place, error, () => working(panel, work));
  } finally {
    buttons.forEach((one) => { one.disabled = false; });
    panel.removeAttribute('aria-busy');
  }
}

const lines = (text) => text.split('\n').map((line) => line.trim()).filter(Boolean);

let lineCount = 0;

/* Tokens in a line. colours[i] may be a background. Arrow keys move, Enter or a click picks.
   pick(i, element), chosen: a Set of those that are marked. hover(i) as the cursor passes. */
function tokenLine(tokens, { colours = [], titles = [], chosen = new Set(), pick, hover, label,
  at = 0 } = {}) {
  const line = make('div.tokens');
  const spans = tokens.map((token, i) => {
    const span = make('span', { class: chosen.has(i) ? 'token chosen' : 'token',
      title: titles[i] ?? null }, token === '' ? '∅' : token.replace(/\n/g, '↵\n'));
    if (colours[i]) span.style.background = colours[i];
    return span;
  });
  line.append(...spans);
  if (!pick) return line;
  line.tabIndex = 0;
  line.setAttribute('role', 'listbox');
  line.setAttribute('aria-multiselectable', 'true');
  line.setAttribute('aria-label', `${label ?? 'tokens'}: arrow keys move, Enter picks`);
  const name = `t${++lineCount}`;
  const mark = (i) => {
    spans[at]?.classList.remove('cursor');
    at = min(max(i, 0), spans.length - 1);
    spans[at].classList.add('cursor');
    line.setAttribute('aria-activedescendant', spans[at].id);
    hover?.(at);
  };
  spans.forEach((span, i) => {
    span.id = `${name}-${i}`;
    span.setAttribute('role', 'option');
    span.setAttribute('aria-selected', chosen.has(i));
    on(span, 'click', () => { mark(i); pick(i, span); });
    if (hover) on(span, 'mouseenter', () => hover(i));
  });
  on(line, 'focus', () => mark(at));
  on(line, 'keydown', (e) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -spans.length, End: spans.length }[e.key];
    if (step) { e.preventDefault(); mark(at + step); }
    if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); pick(at, spans[at]); }
  });
  return line;
}

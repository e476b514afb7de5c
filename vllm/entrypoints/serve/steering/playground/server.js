// What the page asks of its server. Keys are read where they were typed, and kept nowhere else.

const base = location.pathname.replace(/\/playground\/?$/, '');

class Refused extends Error {
  constructor(status, message, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

function headersFor(path) {
  const headers = { 'Content-Type': 'application/json' };
  const api = $('api-key').value, steering = $('steering-key').value;
  if (api) headers.Authorization = `Bearer ${api}`;
  if (steering && path.startsWith('/v1/steering')) headers['X-Steering-Key'] = steering;
  return headers;
}

async function send(method, path, body, signal) {
  let answer;
  try {
    answer = await fetch(base + path, { method, headers: headersFor(path), signal,
      body: body && JSON.stringify(body), credentials: 'omit', redirect: 'error' });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Refused(0, 'the server does not answer: it has ended, or the connection has', null);
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  const text = await answer.text();
  try {
    const said = JSON.parse(text);
    const error = said.error ?? {};
    return new Refused(answer.status, error.message ?? said.detail ?? text, error.param ?? null);
  } catch {
    return new Refused(answer.status, text.slice(0, 400) || answer.statusText, null);
  }
}

const get = async (path) => (await send('GET', path)).json();
const post = async (path, body, signal) => (await send('POST', path, body, signal)).json();
const remove = async (path) => (await send('DELETE', path)).json();

// The server-sent events of an answer, as {name, data}; throws where they end before [DONE].
async function* events(path, body, signal) {
  const answer = await send('POST', path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      piece = { done: true };
    }
    if (piece.done) throw new Refused(0, 'the answer broke off: the server ended within it', null);
    const parts = (rest + piece.value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split('\n');
      const field = (key) => lines.filter((line) => line.startsWith(`${key}: `))
        .map((line) => line.slice(key.length + 2)).join('\n');
      const data = field('data');
      if (data === '[DONE]') return;
      // A comment keeps the connection open.
      if (!data) continue;
      const value = JSON.parse(data);
      if (value.error) throw new Refused(value.error.code, value.error.message, value.error.param);
      yield { name: field('event'), data: value };
    }
  }
}

// The text of tokens, each asked for once.
const tokenTexts = new Map();
async function textsOf(ids) {
  const unknown = [...new Set(ids)].filter((id) => !tokenTexts.has(id));
  await Promise.all(unknown.map(async (id) => {
    const answer = await post('/detokenize', { model: state.model, tokens: [id] });
    tokenTexts.set(id, answer.prompt);
  }));
  return ids.map((id) => tokenTexts.get(id));
}

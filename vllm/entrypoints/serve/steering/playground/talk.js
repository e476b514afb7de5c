// Chat: a tree of turns. A turn asked again, or edited, is another branch beside it; each is
// answered plain and with the terms, and the chat goes on from the latter.

const MOST_TURNS = 200, MOST_CHAT = 16384;

const textOf = (answer) => answer.pieces.map((piece) => piece.text).join('');
const keptOf = (turn) => turn.steered ?? turn.plain;

// The turns from the first to turn `at`, their numbers.
function branchTo(at) {
  const branch = [];
  for (; at >= 0; at = state.chat.turns[at].parent) branch.unshift(at);
  return branch;
}

const beside = (at) => state.chat.turns.map((_, i) => i)
  .filter((i) => state.chat.turns[i].parent === state.chat.turns[at].parent);

// The last turn that was made after a turn, of its branch.
function endOf(at) {
  const after = state.chat.turns.findLastIndex((turn) => turn.parent === at);
  return after < 0 ? at : endOf(after);
}

async function say(parent, text) {
  const { chat } = state;
  if (!text.trim()) throw new Error('a message is needed');
  if (chat.turns.length >= MOST_TURNS) throw new Error(`a chat has ${MOST_TURNS} turns: begin a new one`);
  const messages = [...branchTo(parent).flatMap((i) => [
    { role: 'user', content: chat.turns[i].text },
    { role: 'assistant', content: textOf(keptOf(chat.turns[i])) }]),
  { role: 'user', content: text }];
  const fields = steeringFields(), acts = pairs(fields).length > 0;
  const turn = { parent, text, plain: { name: 'plain', pieces: [] },
    steered: acts ? { name: termsLine(), pieces: [] } : null };
  chat.at = chat.turns.push(turn) - 1;
  // Asked again at a temperature above 0, it is to say something else.
  const seed = settings().seed + beside(chat.at).length - 1;
  showTalk();
  const grow = () => showTurn(turn);
  await together('talk-stop', [
    (signal) => streamed(messages, { seed }, turn.plain, grow, signal),
    ...(acts ? [(signal) =>
      streamed(messages, { ...fields, seed, ...dosed(fields) }, turn.steered, grow, signal)] : [])]);
  return '';
}

const busy = () => $('talk').hasAttribute('aria-busy');
const talk = (parent, text) => busy() || working($('talk'), () => say(parent, text));

function sendMessage() {
  if (busy()) return;
  const { value } = $('message'), { editing, at } = state.chat;
  write('', null);
  talk(editing === null ? at : state.chat.turns[editing].parent, value);
}

// Put a text into the box, in place of a turn or, with null, as the next message.
function write(text, editing) {
  state.chat.editing = editing;
  $('message').value = text;
  put($('message-for'), editing === null ? 'Message' : 'In place of that turn, on a new branch');
  $('message').focus();
}

function showTurn(turn) {
  const [plain, steered] = turn.cells;
  const [a, b] = turn.steered ? firstDifference(turn.plain, turn.steered) : [-1, -1];
  showAnswer(plain, turn.plain, a);
  if (steered) showAnswer(steered, turn.steered, b);
}

function turnRow(at) {
  const turn = state.chat.turns[at], branches = beside(at), place = branches.indexOf(at);
  const go = (step, text) => button(text, () => {
    state.chat.at = endOf(branches[place + step]);
    showTalk();
  }, { disabled: !branches[place + step] && branches[place + step] !== 0,
    'aria-label': step < 0 ? 'branch before' : 'branch after' });
  turn.cells = [make('div'), ...(turn.steered ? [make('div')] : [])];
  const row = make('li', make('p.prompt.wide', turn.text),
    make('span.row', button('Edit', () => write(turn.text, at)), button('Ask again', () => talk(turn.parent, turn.text)),
    ...(branches.length > 1 ? [go(-1, '‹'), `${place + 1} of ${branches.length}`, go(1, '›')] : [])),
    make('div.pair.wide', ...turn.cells));
  showTurn(turn);
  return row;
}

const showTalk = () => put($('turns'), ...branchTo(state.chat.at).map(turnRow));

function newChat() {
  stops['talk-stop']?.abort();
  state.chat = { turns: [], at: -1, editing: null };
  showTalk();
  write('', null);
}

// The chat in a link: of each turn the turn before it, and texts.
const chatInLink = () => ({ at: state.chat.at, turns: state.chat.turns.map((turn) =>
  [turn.parent, turn.text, textOf(turn.plain), turn.steered && textOf(turn.steered),
    turn.steered?.name]) });

// What somebody's link says of a chat; turns that are not of this form end it.
function readChat(said) {
  const turns = [], answerOf = (text, name) => ({ name: String(name).slice(0, 200), done: true,
    pieces: [{ text, ids: [] }] });
  for (const one of Array.isArray(said?.turns) ? said.turns.slice(0, MOST_TURNS) : []) {
    const [parent, text, plain, steered, name] = Array.isArray(one) ? one : [];
    if (!Number.isSafeInteger(parent) || parent < -1 || parent >= turns.length) break;
    if (typeof text !== 'string' || typeof plain !== 'string') break;
    turns.push({ parent, text, plain: answerOf(plain, 'plain'),
      steered: typeof steered === 'string' ? answerOf(steered, name) : null });
  }
  const last = turns.length - 1;
  return { turns, at: Number.isSafeInteger(said?.at) && turns[said.at] ? said.at : last,
    editing: null };
}

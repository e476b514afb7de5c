// Compare: each prompt's answer plain and steered, side by side, as they are written.

// What runs and can be stopped, by the button that stops it.
const stops = {};

const pieceOf = (choice) => choice.delta?.content ?? choice.text ?? '';

// Stream an answer: {pieces: [{text, ids}], finish, rules, dose}; `grow` is called as it grows.
async function stream(prompt, fields, answer, grow, signal) {
  const { path, body } = generation(state.model, prompt, settings(),
    { ...fields, return_token_ids: true });
  for await (const { data } of events(path, body, signal)) {
    const choice = data.choices?.[0];
    if (!choice) continue;
    const text = pieceOf(choice), ids = choice.token_ids ?? [];
    if (text || ids.length) answer.pieces.push({ text, ids });
    if (choice.rules) answer.rules = choice.rules;
    for (const entry of choice.capture_results?.inline?.payload ?? []) {
      const most = max(answer.dose?.[0] ?? 0, ...unpack(entry));
      if (most !== answer.dose?.[0]) answer.dose = [most, `${entry.point} ${entry.layer}`];
    }
    if (choice.finish_reason) {
      answer.finish = choice.stop_reason ?? choice.finish_reason;
      answer.done = true;
    }
    grow();
  }
}

// The first piece of each answer in which the tokens differ; -1 where they are the same so far.
function firstDifference(plain, steered) {
  const ids = (answer) => answer.pieces.flatMap((piece, i) => piece.ids.map((id) => [id, i]));
  const a = ids(plain), b = ids(steered);
  const at = a.findIndex(([id], i) => i < b.length && b[i][0] !== id);
  if (at >= 0) return [a[at][1], b[at][1], at];
  // One may have ended where the other goes on.
  if (plain.done && steered.done && a.length !== b.length) {
    const end = min(a.length, b.length);
    return [a[end]?.[1] ?? -1, b[end]?.[1] ?? -1, end];
  }
  return [-1, -1, -1];
}

function lights(rules) {
  return pairs(rules ?? {}).map(([name, rule]) => make('span.light', {},
    make('span', { class: rule.fired_at === null ? 'lamp' : 'lamp on alert' }), name, ' ',
    make('small', rule.fired_at === null ? `quiet, most ${shown(rule.max)}`
      : `fired at ${rule.fired_at}, ${rule.fired} of ${rule.rows} rows, most ${shown(rule.max)}`)));
}

function showAnswer(place, answer, differs) {
  const text = make('p.answer');
  answer.pieces.forEach((piece, i) => text.append(i === differs
    ? make('mark', { title: 'the first token that differs' }, piece.text || '∅') : piece.text));
  put(place, make('small.quiet', answer.name), text,
    make('div', ...lights(answer.rules)),
    make('small.quiet', answer.finish ? `ended: ${answer.finish}` : '',
      answer.dose ? `; dose up to ${shown(answer.dose[0])} at ${answer.dose[1]}` : ''));
  if (answer.error) sayError(place.appendChild(make('div')), answer.error);
}

function pairRow(prompt) {
  const pair = { prompt, plain: { name: 'plain', pieces: [] },
    steered: { name: 'steered', pieces: [] }, differs: -1 };
  const cells = [make('div'), make('div')];
  const row = make('li', make('p.prompt', prompt, ' ',
    button('Look', () => { $('look-prompt').value = prompt; $('look').scrollIntoView(); })),
  make('div.pair', ...cells));
  const grow = () => {
    const [a, b, at] = firstDifference(pair.plain, pair.steered);
    pair.differs = at;
    showAnswer(cells[0], pair.plain, a);
    showAnswer(cells[1], pair.steered, b);
  };
  return { pair, row, grow };
}

// Stream an answer, and show why it ended where it did not end by itself.
async function streamed(prompt, fields, answer, grow, signal) {
  try {
    await stream(prompt, fields, answer, grow, signal);
  } catch (error) {
    if (error.name === 'AbortError') answer.finish = 'stopped';
    else answer.error = error;
    grow();
    throw error;
  }
}

// Stream answers side by side, until all have ended or the button `stop` is pressed; throws what the
// first failure was.
async function together(stop, asked) {
  stops[stop] = new AbortController();
  $(stop).hidden = false;
  try {
    const ended = await Promise.allSettled(asked.map((ask) => ask(stops[stop].signal)));
    const failed = ended.find((one) => one.status === 'rejected');
    if (failed) throw failed.reason;
  } finally {
    $(stop).hidden = true;
  }
}

const dosed = (fields) => (pairs(fields).length && can.capture() ? doseCapture(fields) : {});

async function compare() {
  const prompts = lines($('prompts').value);
  if (!prompts.length) throw new Error('a prompt is needed, one a line');
  const steering = steeringFields(), rules = rulesOf(state.rules, state.directions);
  const rows = prompts.map(pairRow);
  state.compare = rows.map((one) => one.pair);
  put($('answers'), ...rows.map((one) => one.row));
  const both = { ...steering, ...rules, ...dosed(steering) };
  await together('stop', rows.flatMap(({ pair, grow }) => [
    (signal) => streamed(pair.prompt, rules, pair.plain, grow, signal),
    (signal) => streamed(pair.prompt, both, pair.steered, grow, signal),
  ]));
  const changed = state.compare.filter((pair) => pair.differs >= 0).length;
  return `${changed} of ${prompts.length} answers differ` +
    (Object.keys(steering).length ? '' : '; nothing steers, so none should');
}

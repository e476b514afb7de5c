// Scales: the first prompt's answer at several strengths of the slider that was moved last.

const SCALES = [-4, -2, 0, 2, 4];

async function scales() {
  const prompt = lines($('prompts').value)[0];
  const [source, name] = lastMoved ?? parted(sourcesOf()[0]?.value ?? '');
  if (!prompt) throw new Error('a prompt is needed, one a line');
  if (!name) throw new Error('a direction is needed: find one');
  const others = state.terms.filter((one) => one !== termOf(source, name));
  const term = termOf(source, name) ?? termFor(source, name);
  state.scales = SCALES.map((number) => ({ number, name: `${name} ${number}`, pieces: [] }));
  const cells = SCALES.map(() => make('div')), plain = state.scales[SCALES.indexOf(0)];
  put($('answers'), make('li', make('p.prompt', prompt), make('div.scales.wide', ...cells)));
  const grow = () => state.scales.forEach((one, i) =>
    showAnswer(cells[i], one, firstDifference(plain, one)[1]));
  await together('stop', state.scales.map((one) => {
    const fields = steeringOf([...others, { ...term, number: one.number }], state.directions,
      state.shape.num_layers);
    return (signal) => streamed(prompt, { ...fields, ...dosed(fields) }, one, grow, signal);
  }));
  return `${name} at ${SCALES.length} scales`;
}

// Presets: ready settings, each a direction by its texts, prompts and a strength; and the server's
// modules. One choice fills Find, finds the direction, sets its slider and answers.

// Texts that differ in one thing, with a slash between what is for and what is against it.
const PRESETS = {
  cheerful: { strength: 3, prompts: ['After the meeting, my mood was', 'The town looked'], texts: [
    'I love this place. It is/I hate this place. It is',
    'What a wonderful day! I feel/What an awful day! I feel',
    'She laughed with joy and felt/She wept with grief and felt',
    'This is the best news. I am so/This is the worst news. I am so'] },
  French: { strength: 1.5, prompts: ['My favourite food is', 'The weather today is'], texts: [
    'Le chat dort sur la table/The cat sleeps on the table',
    'Nous allons au marché demain matin/We are going to the market tomorrow morning',
    'Il fait très froid en hiver/It is very cold in winter',
    'Elle a écrit une longue lettre/She wrote a long letter'] },
  sea: { strength: 1.5, prompts: ['On Monday I went to', 'My favourite story is about'], texts: [
    'The sailors steered their ship across the ocean/The farmers drove a tractor across the field',
    'Waves broke over the deck of the boat/Snow fell over the roof of the house',
    'Fish swam around the coral reef/Cars drove around the city centre',
    'The harbour was full of masts and sails/The office was full of desks and chairs'] },
};

function showPresets() {
  refill($('preset'), [{ value: '', text: 'choose one' },
    ...(can.capture() && can.steer() ? Object.keys(PRESETS) : []).map((name) =>
      ({ value: `texts ${name}`, text: `${name}, at ${PRESETS[name].strength}` })),
    ...Object.keys(state.modules).map((name) =>
      ({ value: `module ${name}`, text: `module ${name}, at ${MODULE_STRENGTH}` }))]);
}

const MODULE_STRENGTH = 2;

async function usePreset() {
  const [kind, name] = picked('preset');
  $('preset').value = '';
  if (kind !== 'texts') return name && slideTo('module', name, MODULE_STRENGTH);
  const { strength, prompts, texts } = PRESETS[name];
  const halves = texts.map((both) => both.split('/'));
  $('examples').value = halves.map(([one]) => one).join('\n');
  $('against').value = halves.map(([, other]) => other).join('\n');
  $('direction-name').value = name;
  $('prompts').value = prompts.join('\n');
  await find();
  return slideTo('direction', name, strength);
}

// Have a slider, and no other, at a number, and answer.
function slideTo(source, name, number) {
  state.terms.forEach((one) => { one.on = false; });
  const term = state.terms.find((one) => one.source === source && one.name === name) ??
    newTerm(source, name);
  Object.assign(term, { number, on: true });
  lastMoved = [source, name];
  showTerms();
  return compare();
}

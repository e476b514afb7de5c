// Starts the page: reads the server, says what is off, takes up what the link says.

// Of each panel: whether it can do its work, the flags that turn that on, the work of its button.
const PANELS = {
  find: [can.capture, '--capture-consumers inline', find],
  train: [can.train, '--steering-train', train],
  steer: [can.steer, '--enable-steering'],
  look: [can.capture, '--capture-consumers inline', look],
  attention: [can.attention, '--capture-points pre_attn post_attn post_block q z', () => heads()],
  sae: [() => can.features().length > 0, '--features NAME=PATH@POINT.LAYER', readFeatures],
  trace: [() => can.family('replace') && can.capture(),
    '--enable-steering --steering-families add replace --capture-consumers inline', trace],
};

const CLICKS = {
  'use-found': () => addTerm('direction', state.find.name),
  'train-cancel': () => remove(TRAIN),
  'save-module': () => working($('find'), saveModule),
  download: () => downloadFound('safetensors'),
  'download-gguf': () => downloadFound('gguf'),
  'add-term': () => addTerm(...picked('term-source')),
  'add-rule': () => addRule(...picked('rule-source')),
  ablate: () => working($('attention'), ablate),
  scales: () => wish(scales),
  stop: () => stops.stop?.abort(),
  'talk-stop': () => stops['talk-stop']?.abort(),
  'new-chat': newChat,
  'trace-stop': () => stopTrace?.abort(),
  share,
};
const KEPT_AFTER = 300;

function startPanels() {
  for (const [id, [able, flag, work]] of pairs(PANELS)) {
    const panel = $(id), form = panel.querySelector('form');
    if (!able()) {
      panel.querySelectorAll('button.run').forEach((one) => { one.disabled = true; });
      panel.querySelector('h2').after(make('p.off', 'Off on this server. ', make('code', flag),
        ' turns it on.'));
    }
    if (work) submitted(form, () => working(panel, work));
  }
  for (const node of [$('sae'), document.querySelector('a[href="#sae"]')]) {
    node.hidden = !can.features().length;
  }
  refill($('sae-name'), can.features().map((value) => ({ value })));
  on($('sae-labels'), 'change', () => working($('sae'), readLabels));
  on($('vector-file'), 'change', () => working($('find'), openFile));
  const points = state.capture.points?.filter((p) => !'qkvz'.includes(p)) ?? [];
  for (const id of ['find-point', 'trace-point']) {
    const heads = id === 'trace-point' && can.heads() && can.attention();
    refill($(id), [...points.map((value) => ({ value })),
      ...(heads ? [{ value: 'z', text: 'heads' }] : [])]);
    if (points.includes('post_block')) $(id).value = 'post_block';
  }
  $('train-layers').value = floor(0.6 * (state.shape?.num_layers ?? 0));
  const lenses = can.lenses();
  refill($('look-lens'), [...lenses.map((value) => ({ value })),
    { value: '', text: lenses.length ? 'none' : 'off: --capture-lens logit' }], lenses[0]);
  $('copies').append(...Object.keys(COPIES).map((kind) =>
    button(kind, () => working($('steer'), () => showCopy(kind)))));
  // What was typed before a reload is in the tab's own history, and nowhere else.
  const said = readLink(`#${history.state?.code ?? ''}`) ?? readLink(location.hash);
  const missing = said ? restore(said) : [];
  if (missing.length) {
    put($('link-said'), `Not in the link: ${[...new Set(missing)].join(', ')}. ` +
      'Find it again, with the texts that are, or open its file.');
  }
}

function submitted(form, work) {
  on(form, 'submit', (e) => {
    e.preventDefault();
    work();
  });
}

async function share() {
  const { url, left } = asLink();
  history.replaceState(null, '', url);
  const said = await copyText(url);
  put($('link-said'), 'The address now has all but keys and answers; ' +
    (said === 'copied' ? 'it was copied. ' : 'copy it from there. ') +
    (left.length ? `Left out, too large for a link: ${left.join(', ')}.` : ''));
}

let keeping;
function keep() {
  clearTimeout(keeping);
  keeping = setTimeout(() => started && history.replaceState({ code: asLink().code }, ''),
    KEPT_AFTER);
}

let started = false;
async function connect() {
  await working($('model'), async () => {
    await readServer();
    if (!started) startPanels();
    started = true;
    showModel();
    showSources();
  });
  document.body.dataset.ready = started;
}

for (const [id, clicked] of pairs(CLICKS)) $(id).onclick = clicked;
submitted($('keys'), connect);
submitted($('compare').querySelector('form'), answer);
submitted($('talk').querySelector('form'), sendMessage);
on($('message'), 'keydown', (e) => {
  if (e.key === 'Enter' && !e.shiftKey && !e.isComposing) {
    e.preventDefault();
    sendMessage();
  }
});
on($('preset'), 'change', () => $('preset').value && wish(usePreset));
for (const kind of ['input', 'change', 'click']) on(document.querySelector('main'), kind, keep);
connect();

// Train: `vllm steering train` of pairs, beside the engine: its progress, its report, its vector.

const TRAIN = '/v1/steering/train', TRAIN_EVERY = 1000, TRAINED = 'trained';

async function train() {
  const { epochs, layers } = { epochs: Number($('train-epochs').value),
    layers: layersOf($('train-layers').value, state.shape.num_layers) };
  const taught = lines($('train-pairs').value).map((line, i) => {
    const [prompt, positive, negative, more] = line.split('|').map((one) => one.trim());
    if (!negative || more !== undefined) {
      throw new Error(`pair ${i + 1}: must be prompt | wanted | other`);
    }
    return { prompt, positive: ` ${positive}`, negative: ` ${negative}` };
  });
  await post(TRAIN, { pairs: taught, method: $('train-method').value, layers, epochs });
  $('trained').hidden = true;
  $('train-progress').max = epochs;
  return followTraining();
}

async function followTraining() {
  $('training').hidden = false;
  try {
    for (;;) {
      const job = await get(TRAIN), last = job.said?.at(-1) ?? '';
      put($('train-said'), last || 'starting …');
      $('train-progress').value = Number(last.match(/^pass (\d+)/)?.[1] ?? 0);
      if (job.state === 'failed') throw new Error(last);
      if (job.state !== 'running') return job.report ? showTrained(job) : 'cancelled';
      await new Promise((done) => setTimeout(done, TRAIN_EVERY));
    }
  } finally {
    $('training').hidden = true;
  }
}

function showTrained({ report, safetensors }) {
  const { evidence, losses, settings: { layers, method } } = report;
  $('trained').hidden = false;
  strip($('train-strip'), 'How much likelier wanted texts are than others, on held-out pairs', [
    { name: TRAINED, values: [evidence.margin], texts: [TRAINED] },
    { name: 'random', values: evidence.randoms, texts: evidence.randoms.map(() => 'random vector') },
  ], 'nats');
  const [first, ended] = [losses.choose[0], min(...losses.choose)].map(shown);
  put($('train-numbers'), `${method} at layers ${layers.join(', ')} · margin ` +
    `${shown(evidence.margin)} nats, standard error ${shown(evidence.error)} · ` +
    `${evidence.cases} held-out pairs · loss ${first} to ${ended} in ${losses.choose.length} passes`);
  if (!safetensors) return 'no result: no better than random vectors or chance';
  state.directions[TRAINED] = directionIn(bytesOf(safetensors));
  showSources();
  return `${TRAINED} is on a slider`;
}

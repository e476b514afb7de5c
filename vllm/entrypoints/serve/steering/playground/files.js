// Vectors in files: safetensors, and GGUF control vectors. A file that is opened is somebody's
// bytes: read here, never sent, and refused unless all of it are vectors of this model.

const MOST_FILE = 1 << 26, MOST_HEADER = 1 << 20, MOST_VECTORS = 4096;
const DTYPES = { F32: 'float32', F16: 'float16', BF16: 'bfloat16' };
const GGUF_TYPES = { 0: 'F32', 1: 'F16', 30: 'BF16' };
// Bytes of a value of a GGUF file, by its type; 8 is a text, 9 a list.
const GGUF_SIZES = { 0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8 };
const GGUF_ALIGNED = 32;

// [name, dtype, from, to] of each tensor of a safetensors file.
function safetensorsIn(bytes) {
  const size = Number(new DataView(bytes.buffer).getBigUint64(0, true));
  if (size > MOST_HEADER) throw new Error('its header has more than 1 MiB');
  const { __metadata__: about, ...tensors } =
    JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + size)));
  if (about?.ops) throw new Error('it has operations: start the server with --steering-modules NAME=PATH');
  return pairs(tensors).map(([name, { dtype, data_offsets: [from, to] }]) =>
    [name, dtype, 8 + size + from, 8 + size + to]);
}

// The same of a GGUF file. Past its end, reading throws.
function ggufIn(bytes) {
  const view = new DataView(bytes.buffer);
  let at = 8, aligned = GGUF_ALIGNED;
  const whole = () => Number(view.getBigUint64((at += 8) - 8, true));
  const small = () => view.getUint32((at += 4) - 4, true);
  const text = () => {
    const size = whole();
    if (size > MOST_HEADER) throw new Error('it has a text of more than 1 MiB');
    return new TextDecoder().decode(bytes.subarray(at, at += size));
  };
  const skip = (type) => {
    if (type === 8) text();
    else if (type !== 9) at += GGUF_SIZES[type];
    else {
      const inner = small(), count = whole();
      if (inner !== 8) at += count * GGUF_SIZES[inner];
      else for (let i = 0; i < count; i++) text();
    }
    if (!(at <= bytes.length)) throw new Error('it is truncated');
  };
  const count = whole(), values = whole();
  for (let i = 0; i < values; i++) {
    const key = text(), type = small();
    if (key === 'general.alignment') aligned = view.getUint32(at, true);
    skip(type);
  }
  if (count > MOST_VECTORS) throw new Error(`it has more than ${MOST_VECTORS} tensors`);
  const found = Array.from({ length: count }, () => {
    const name = text(), sizes = Array.from({ length: min(4, small()) }, whole);
    const dtype = GGUF_TYPES[small()], from = whole();
    return [name, dtype, from, from + sizes.reduce((a, b) => a * b, dtype === 'F32' ? 4 : 2)];
  });
  const start = ceil(at / aligned) * aligned;
  return found.map(([name, dtype, from, to]) => [name, dtype, start + from, start + to]);
}

// The direction in a file: {point, layer, vectors, acts}. Throws what does not fit, and what to do.
function directionIn(bytes) {
  const gguf = String.fromCharCode(...bytes.subarray(0, 4)) === 'GGUF';
  const tensors = (gguf ? ggufIn : safetensorsIn)(bytes);
  const { hidden_size: hidden, num_layers: count, steering_points: points } = state.shape;
  if (!tensors.length || tensors.length > MOST_VECTORS) {
    throw new Error(`it has ${tensors.length} vectors: 1 to ${MOST_VECTORS} are read`);
  }
  const vectors = {};
  let where = null;
  for (const [name, dtype, from, to] of tensors) {
    const refuse = (why) => { throw new Error(`${name.slice(0, 80)}: ${why}`); };
    const [, tier, point, layer] = (gguf ? name.replace(/^direction\./, 'base.post_block.') : name)
      .match(/^(base|prefill|decode)\.(\w+)\.(\d{1,5})$/) ?? [];
    if (!tier) refuse('is not named base.post_block.12, nor direction.12 in a GGUF file');
    if (tier !== 'base') refuse('acts in one phase: start the server with --steering-modules NAME=PATH');
    if (!points.includes(point)) refuse(`this server steers at ${points.join(', ')}`);
    if (point !== (where ??= point)) refuse(`has another point than ${where}: one file, one point`);
    if (Number(layer) >= count) refuse(`the model has the layers 0-${count - 1}`);
    if (!DTYPES[dtype]) refuse('F32, F16 and BF16 are read: convert it');
    if (!(from >= 0 && from <= to && to <= bytes.length)) refuse('the file is truncated');
    if ((to - from) !== hidden * (dtype === 'F32' ? 4 : 2)) {
      refuse(`has ${to - from} bytes of ${dtype}: the model's vectors have ${hidden} numbers`);
    }
    const vector = numbersIn(DTYPES[dtype], bytes.slice(from, to).buffer);
    if (!vector.every(Number.isFinite)) refuse('has a number that is not finite');
    vectors[Number(layer)] = vector;
  }
  const layers = Object.keys(vectors).map(Number);
  return { point: where, layer: layers[floor(layers.length / 2)], vectors, acts: layers.join(', ') };
}

async function openFile() {
  const [file] = $('vector-file').files;
  if (!file) return '';
  if (file.size > MOST_FILE) throw new Error(`${file.name}: has more than 64 MiB, which is read at most`);
  let direction;
  try {
    direction = directionIn(new Uint8Array(await file.arrayBuffer()));
  } catch (error) {
    // Of a file that is none of these, whatever reading it threw.
    throw new Error(`${file.name}: ${error.constructor === Error ? error.message
      : 'cannot be read as safetensors or GGUF, or is truncated'}`);
  }
  const name = file.name.replace(/\.\w+$/, '').slice(0, 64) || 'file';
  state.directions[name] = direction;
  showSources();
  return `${name} is on a slider, at layers ${direction.acts}`;
}

// A file that --steering-modules and every other reader of safetensors takes.
function safetensorsFile(tensors, metadata) {
  const header = { __metadata__: metadata };
  let end = 0;
  for (const [name, values] of tensors) {
    header[name] = { dtype: 'F32', shape: [values.length],
      data_offsets: [end, end += 4 * values.length] };
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const padded = new Uint8Array(ceil(text.length / 8) * 8).fill(32);
  padded.set(text);
  return joined([whole64(padded.length), padded, ...tensors.map(([, values]) => floats(values))]);
}

// A control vector, as llama.cpp and repeng read them; tensors: [[name, numbers]].
function ggufFile(tensors, model) {
  const texts = new TextEncoder();
  const text = (value) => {
    const bytes = texts.encode(value);
    return [whole64(bytes.length), bytes];
  };
  const small = (value) => new Uint8Array(Uint32Array.of(value).buffer);
  const size = (values) => ceil(4 * values.length / GGUF_ALIGNED) * GGUF_ALIGNED;
  let end = 0;
  const head = joined([texts.encode('GGUF'), small(3), whole64(tensors.length), whole64(3),
    ...text('general.architecture'), small(8), ...text('controlvector'),
    ...text('controlvector.model_hint'), small(8), ...text(model),
    ...text('controlvector.layer_count'), small(4), small(tensors.length),
    ...tensors.flatMap(([name, values]) => [...text(name), small(1), whole64(values.length),
      small(0), whole64((end += size(values)) - size(values))])]);
  const pad = (bytes, to) => {
    const padded = new Uint8Array(to);
    padded.set(bytes);
    return padded;
  };
  return joined([pad(head, ceil(head.length / GGUF_ALIGNED) * GGUF_ALIGNED),
    ...tensors.map(([, values]) => pad(floats(values), size(values)))]);
}

const floats = (values) => new Uint8Array(Float32Array.from(values).buffer);
const whole64 = (value) => new Uint8Array(BigUint64Array.of(BigInt(value)).buffer);

function joined(parts) {
  const bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}

function download(bytes, name) {
  const url = URL.createObjectURL(new Blob([bytes], { type: 'application/octet-stream' }));
  make('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

// Arrays as the server packs them, and the arithmetic of directions: pure functions, no page.

const { abs, ceil, exp, floor, PI, max, min, round, sqrt } = Math;
const pairs = Object.entries, record = Object.fromEntries;

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
}

function base64Of(bytes) {
  let text = '';
  for (let i = 0; i < bytes.length; i += 8192) {
    text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  }
  return btoa(text);
}

function floatOfHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

// {dtype, shape, data} -> all its numbers, in C order.
const unpack = ({ dtype, data }) => numbersIn(dtype, bytesOf(data).buffer);

// Little-endian, as JavaScript's hosts are.
function numbersIn(dtype, buffer) {
  switch (dtype) {
    case 'float32': return new Float32Array(buffer);
    case 'float16': return Float32Array.from(new Uint16Array(buffer), floatOfHalf);
    case 'bfloat16': {
      const wide = Uint32Array.from(new Uint16Array(buffer), (half) => half << 16);
      return new Float32Array(wide.buffer);
    }
    case 'int32': return new Int32Array(buffer);
    case 'int64': return Float64Array.from(new BigInt64Array(buffer), Number);
  }
  throw new Error(`the server sent an array of ${dtype}, which this page cannot read`);
}

// The rows of [n, ...]: n arrays of all that is behind the first axis.
function unpackRows(packed) {
  const values = unpack(packed);
  const width = packed.shape.slice(1).reduce((a, b) => a * b, 1);
  return Array.from({ length: packed.shape[0] },
    (_, i) => values.subarray(i * width, (i + 1) * width));
}

// [hidden] as [hidden]; several as [n, hidden].
function pack(vector) {
  return { dtype: 'float32', shape: [vector.length],
    data: base64Of(new Uint8Array(Float32Array.from(vector).buffer)) };
}

function packMatrix(rows) {
  const flat = rows.flatMap((row) => Array.from(row));
  return { ...pack(flat), shape: [rows.length, rows[0].length] };
}

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

const norm = (a) => sqrt(dot(a, a));
const unit = (a) => Array.from(a, (x) => x / norm(a));
const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;

function meanRow(rows) {
  const sum = new Float64Array(rows[0].length);
  for (const row of rows) for (let i = 0; i < sum.length; i++) sum[i] += row[i];
  return sum.map((x) => x / rows.length);
}

// Half the difference of the means: scale 1 goes from between the classes to the examples' mean.
function directionOf(examples, against) {
  const a = meanRow(examples), b = meanRow(against);
  return a.map((x, i) => (x - b[i]) / 2);
}

// The chance that an example's score is above one against; ties count a half.
function auroc(examples, against) {
  let above = 0;
  for (const a of examples) for (const b of against) above += a > b ? 1 : a === b ? 0.5 : 0;
  return above / (examples.length * against.length);
}

// Scores along the direction that is found without the scored row itself.
function heldOut(rows, others, sign) {
  const count = rows.length, centre = meanRow(rows), other = meanRow(others);
  return rows.map((row) => {
    let along = 0, size = 0;
    for (let i = 0; i < row.length; i++) {
      const w = sign * ((count * centre[i] - row[i]) / (count - 1) - other[i]);
      along += row[i] * w;
      size += w * w;
    }
    return along / sqrt(size);
  });
}

// All that Find says of a layer, of its rows.
function found(examples, against) {
  const vector = directionOf(examples, against);
  const along = unit(vector);
  const scores = { examples: examples.map((row) => dot(row, along)),
    against: against.map((row) => dot(row, along)) };
  const enough = min(examples.length, against.length) > 1;
  return {
    vector, scores, norm: norm(vector), stream: mean([...examples, ...against].map(norm)),
    auroc: auroc(scores.examples, scores.against),
    held: enough
      ? auroc(heldOut(examples, against, 1), heldOut(against, examples, -1)) : null,
  };
}

// "12", "4-11", "all", "0, 3" -> layers. Throws what is no layer.
function layersOf(text, count) {
  const layers = new Set();
  for (const part of String(text).split(',').map((one) => one.trim())) {
    const [, first, last] = part.match(/^(\d+)(?:\s*-\s*(\d+))?$/) || [];
    if (part !== 'all' && first === undefined) throw new Error(`“${part}” is no layer`);
    const from = part === 'all' ? 0 : Number(first);
    const to = part === 'all' ? count - 1 : Number(last ?? first);
    if (to >= count || from > to) throw new Error(`layers are 0-${count - 1}, not “${part}”`);
    for (let layer = from; layer <= to; layer++) layers.add(layer);
  }
  return [...layers].sort((a, b) => a - b);
}

// A number for reading: as many digits as tell it from its neighbours.
function shown(number) {
  if (number === null || number === undefined) return '–';
  if (!Number.isFinite(number)) return String(number);
  const size = abs(number);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return number.toExponential(2);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return number.toFixed(digits);
}

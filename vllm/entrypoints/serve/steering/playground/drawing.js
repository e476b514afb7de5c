// Drawings: maps on canvas, bars and strips in SVG. Each is drawn anew when its width or the
// colours change.

const redraws = new Map();
const watched = new ResizeObserver((entries) => entries.forEach((e) => redraws.get(e.target)?.()));
on(matchMedia('(prefers-color-scheme: dark)'), 'change', () =>
  redraws.forEach((redraw) => redraw()));

function drawIn(place, draw) {
  const redraw = () => { if (place.isConnected && place.clientWidth) draw(place.clientWidth); };
  if (!redraws.has(place)) watched.observe(place);
  redraws.set(place, redraw);
  redraw();
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function mixed(from, to, share) {
  const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const a = parts(from), b = parts(to);
  return `rgb(${a.map((x, i) => round(x + (b[i] - x) * share)).join(',')})`;
}

// A value's colour: blue below 0, red above; of a scale that begins at 0, violet.
function colourOf(value, bound, sequential, depth = 1) {
  const share = min(1, abs(value) / bound) * depth;
  return mixed(colour('--paper'), colour(sequential ? '--much' : value < 0 ? '--low' : '--high'),
    share);
}

function boundOf(values) {
  return max(1e-9, ...values.flat().filter((x) => Number.isFinite(x)).map(abs));
}

// Of [rows][tokens] the bound of all tokens but the first, whose row is far longer in most models.
const boundOfTokens = (values) => boundOf(values.map((row) => (row.length > 1 ? row.slice(1) : row)));

function legend(bound, sequential, label) {
  const ramp = make('span.ramp');
  const stops = sequential ? [0, bound / 2, bound] : [-bound, -bound / 2, 0, bound / 2, bound];
  const paint = () => {
    const colours = stops.map((value) => colourOf(value, bound, sequential));
    ramp.style.background = `linear-gradient(to right, ${colours.join(',')})`;
  };
  const line = make('div.legend', shown(stops[0]), ramp, shown(bound), ' ', label);
  drawIn(line, paint);
  return line;
}

const LABEL_FONT = '11px ui-monospace, "DejaVu Sans Mono", monospace', MOST_LABEL = 24;
const LEAN = PI / 3;

// A token on one line, whole unless it is longer than any word.
function oneLine(text) {
  const one = [...String(text).replace(/\n/g, '↵')];
  return one.length > MOST_LABEL ? one.slice(0, MOST_LABEL - 1).join('') + '…' : one.join('');
}

// Room for the names of rows on the left and of words below, which lean to the left.
function marginsOf(pen, rows, columns) {
  pen.font = LABEL_FONT;
  const wide = (name) => pen.measureText(name).width;
  const below = max(0, ...columns.map(wide)), first = max(0, ...columns.slice(0, 3).map(wide));
  return { left: ceil(max(34, 8 + max(...rows.map(wide)), first * Math.cos(LEAN))),
    foot: ceil(max(10, 12 + below * Math.sin(LEAN))) };
}

/* A map of numbers, [rows][columns]; null is left blank.
   rows, columns: their names. down, across: what they are. unit: of the numbers.
   sequential: from 0 to `bound`. top: whether row 0 is at the top. mark: [row, column] to begin at.
   pick(row, column): where the arrows, the mouse or Enter chose; hover(row, column): passed over.
   Returns a function that marks another [row, column]. */
function heatMap(place, map) {
  const canvas = make('canvas', { tabindex: 0, role: 'img' });
  const said = make('output.reading');
  const bound = map.bound ?? boundOf(map.values);
  let at = map.mark ?? null, box = null;
  const say = (r, c) => {
    put(said, `${map.down} ${map.rows[r]} · ${map.across} ${map.columns[c]} · ` +
      `${shown(map.values[r][c])} ${map.unit}`);
    map.hover?.(r, c);
  };
  const draw = (width) => {
    const rows = map.rows.length, columns = map.columns.length;
    const pen = canvas.getContext('2d');
    const rowNames = map.rows.map(oneLine);
    const columnNames = map.columns.map((name) => (map.words ? oneLine(name) : name));
    const { left, foot } = marginsOf(pen, rowNames, map.words ? columnNames : []);
    const bottom = foot + 24, cell = (width - left - 2) / columns;
    const high = max(4, min(22, round(340 / rows)));
    const height = rows * high + bottom + 6, scale = devicePixelRatio || 1;
    box = { left, top: 6, cell, high, rows, columns };
    Object.assign(canvas, { width: round(width * scale), height: round(height * scale) });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    pen.scale(scale, scale);
    const gap = cell > 7 && high > 7 ? 1 : 0;
    const y = (r) => 6 + (map.top ? r : rows - 1 - r) * high;
    map.values.forEach((row, r) => row.forEach((value, c) => {
      if (value === null || value === undefined) return;
      pen.fillStyle = colourOf(value, bound, map.sequential);
      const from = round(left + c * cell), to = round(left + (c + 1) * cell);
      pen.fillRect(from, y(r), max(1, to - from - gap), high - gap);
    }));
    pen.strokeStyle = colour('--line');
    pen.strokeRect(left - 0.5, 5.5, columns * cell + 1, rows * high + 1);
    pen.fillStyle = colour('--soft');
    pen.font = LABEL_FONT;
    pen.textAlign = 'right';
    pen.textBaseline = 'middle';
    const every = ceil(13 / high);
    rowNames.forEach((name, r) => {
      if (r % every === 0) pen.fillText(name, left - 5, y(r) + high / 2);
    });
    const skip = ceil((map.words ? 12 : 24) / cell);
    columnNames.forEach((name, c) => {
      if (c % skip) return;
      pen.save();
      pen.translate(left + (c + 0.5) * cell, 6 + rows * high + 6);
      if (map.words) pen.rotate(-LEAN);
      pen.textAlign = map.words ? 'right' : 'center';
      pen.textBaseline = map.words ? 'middle' : 'top';
      pen.fillText(name, 0, 0);
      pen.restore();
    });
    pen.textAlign = 'right';
    pen.textBaseline = 'alphabetic';
    pen.font = 'italic 12px ui-serif, Georgia, "DejaVu Serif", serif';
    pen.fillText(map.across, width - 2, height - 3);
    pen.textAlign = 'left';
    pen.fillText(map.down + (map.top ? ' ↓' : ' ↑'), 0, height - 3);
    if (at) {
      pen.strokeStyle = colour('--ink');
      pen.lineWidth = 2;
      pen.strokeRect(left + at[1] * cell, y(at[0]), cell - gap, high - gap);
    }
  };
  const under = (event) => {
    const c = floor((event.offsetX - box.left) / box.cell);
    const r = floor((event.offsetY - box.top) / box.high);
    if (c < 0 || c >= box.columns || r < 0 || r >= box.rows) return null;
    return [map.top ? r : box.rows - 1 - r, c];
  };
  const go = (to) => { at = to; redraws.get(place)(); say(...at); };
  on(canvas, 'mousemove', (e) => { const to = under(e); if (to) say(...to); });
  on(canvas, 'click', (e) => {
    const to = under(e);
    if (to) { go(to); map.pick?.(...to); }
  });
  on(canvas, 'keydown', (e) => {
    const up = map.top ? -1 : 1;
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [up, 0], ArrowDown: [-up, 0] };
    if (e.key === 'Enter' && at) map.pick?.(...at);
    if (!step[e.key]) return;
    e.preventDefault();
    const [r, c] = at ? [at[0] + step[e.key][0], at[1] + step[e.key][1]] : [0, 0];
    go([min(max(r, 0), box.rows - 1), min(max(c, 0), box.columns - 1)]);
  });
  canvas.setAttribute('aria-label', `${map.title}: ${map.down} by ${map.across}. ` +
    'Arrow keys read it, Enter chooses.');
  put(place, make('figcaption', map.title), canvas,
    legend(bound, map.sequential, map.unit), said);
  drawIn(place, draw);
  if (at) say(...at);
  return go;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of pairs(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const words = (x, y, kind, text) => svg('text', { x, y, class: kind }, String(text));
const level = (x1, x2, y, kind) => svg('line', { x1, x2, y1: y, y2: y, class: kind });

/* A chance of each layer, from an even one, 0.5, to 1; a worse one hangs below.
   bars: [layers], null where there is none. ticks: a second number of each, null if there is none.
   named: what the bars are, and the ticks. choose(i): one was chosen. */
function layerBars(place, title, names, bars, ticks, named, at, choose) {
  const drawn = make('div', { tabindex: 0, role: 'slider', 'aria-label': title,
    'aria-valuemin': 0, 'aria-valuemax': names.length - 1 });
  const least = min(0.5, ...bars.map((bar) => bar ?? 0.5), ...ticks ?? []);
  const draw = (width) => {
    const left = 34, high = 130, cell = (width - left - 4) / names.length;
    const y = (value) => 8 + ((1 - value) / (1 - least)) * high;
    const levels = least < 0.5 ? [least, 0.5, 1] : [0.5, 0.75, 1];
    const parts = levels.flatMap((value) =>
      [level(left, width, y(value), 'grid'), words(left - 6, y(value) + 4, 'end',
        round(value * 100) / 100)]);
    names.forEach((name, i) => {
      const x = left + i * cell + cell * 0.14, wide = max(1, cell * 0.72), bar = bars[i] ?? 0.5;
      const whole = svg('rect', { x: left + i * cell, y: 0, width: cell, height: high + 28,
        class: 'touch' });
      on(whole, 'click', () => go(i));
      parts.push(svg('rect', { x, y: min(y(bar), y(0.5)), width: wide,
        height: max(0.5, abs(y(bar) - y(0.5))), class: i === at ? 'bar chosen' : 'bar' }));
      if (ticks) parts.push(level(x, x + wide, y(ticks[i]), 'tick'));
      if (i % ceil(20 / cell) === 0) parts.push(words(x + wide / 2, high + 24, 'middle', name));
      parts.push(whole);
    });
    parts.push(words(width - 2, high + 42, 'end axis', 'layer'));
    put(drawn, svg('svg', { width, height: high + 48 }, ...parts));
    drawn.setAttribute('aria-valuenow', at);
    drawn.setAttribute('aria-valuetext', `layer ${names[at]}: ${shown(bars[at] ?? ticks?.[at])}`);
  };
  const go = (i) => { at = i; redraws.get(place)(); choose(i); };
  on(drawn, 'keydown', (e) => {
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[e.key];
    if (!step) return;
    e.preventDefault();
    go(min(max(at + step, 0), names.length - 1));
  });
  const key = named.flatMap((name, i) => [make(i ? 'span.key.tick' : 'span.key'),
    make('span', name)]);
  put(place, make('figcaption', title), drawn,
    make('div.legend', ...key, make('span', '0.5 is chance')));
  drawIn(place, draw);
}

// Two rows of dots on one axis: where each text lies along a direction.
function strip(place, title, groups, unitName) {
  const drawn = make('div');
  const draw = (width) => {
    const all = groups.flatMap((group) => group.values);
    const low = min(...all), span = max(...all) - low || 1, left = 74, foot = 78;
    const x = (value) => left + 8 + ((value - low) / span) * (width - left - 20);
    const parts = groups.flatMap((group, row) => {
      const y = 18 + row * 28;
      return [level(left, width, y, 'grid'), words(left - 8, y + 4, 'end', group.name),
        ...group.values.map((value, i) => svg('circle',
          { cx: x(value), cy: y, r: 4.5, class: row ? 'dot low' : 'dot high' },
          svg('title', {}, `${group.texts[i]}\n${shown(value)}`)))];
    });
    parts.push(words(x(low), foot, '', shown(low)), words(x(low + span), foot, 'end',
      shown(low + span)), words((left + width) / 2, foot, 'middle axis', unitName));
    put(drawn, svg('svg', { width, height: 86, role: 'img', 'aria-label': title },
      ...parts));
  };
  put(place, make('figcaption', title), drawn);
  drawIn(place, draw);
}

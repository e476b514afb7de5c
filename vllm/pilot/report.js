// The pictures of a report, drawn by the playground's own drawings of the numbers on the page.

const report = JSON.parse($('numbers').textContent);
const names = Object.keys(report.separation), separations = Object.values(report.separation);

const told = (place, i) => put(place, `layer ${names[i]} · AUROC ${shown(separations[i].auroc)} · ` +
  `d′ ${shown(separations[i].d_prime)} · of the vector's sign ${shown(separations[i].share)} · ` +
  `norms of the vector ${shown(separations[i].vector_norm)}, of rows ` +
  shown(separations[i].stream_norm));

{
  const place = $('separation'), read = make('output.reading');
  const aurocs = separations.map((one) => one.auroc);
  const chosen = names.indexOf(String(report.choice.layer));
  const bars = make('figure');
  put(place, bars, read);
  layerBars(bars, 'AUROC of each layer', names, aurocs, null, ['the choose split'], chosen,
    (i) => told(read, i));
  told(read, chosen);
}

if (report.sweep) {
  const { layers, scales, effect, unit } = report.sweep, { layer, scale } = report.choice;
  heatMap($('sweep'), { title: 'Effect on the choose split', rows: layers,
    columns: scales.map((s) => (s > 0 ? `+${s}` : String(s))), values: effect, down: 'layer',
    across: 'scale', unit, mark: [layers.indexOf(layer), scales.indexOf(scale)] });
}

const SVG = "http://www.w3.org/2000/svg";

function add(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// The axes of a chart, as functions from values to coordinates; the vertical axis is logarithmic or linear.
const AREA = { left: 56, right: 704, top: 12, bottom: 336 };
const placeAcross = (low, high) => (value) =>
  AREA.left + ((AREA.right - AREA.left) * Math.log(value / low)) / Math.log(high / low);
const placeUp = (low, high, shape) => (value) =>
  AREA.bottom - ((AREA.bottom - AREA.top) * (shape(value) - shape(low))) / (shape(high) - shape(low));

function across(chart, x, values, title) {
  for (const value of values) {
    add(chart, "line", { class: "grid", x1: x(value), x2: x(value), y1: AREA.top, y2: AREA.bottom });
    add(chart, "text", { x: x(value), y: AREA.bottom + 16, "text-anchor": "middle" }, value);
  }
  add(chart, "text", { x: (AREA.left + AREA.right) / 2, y: AREA.bottom + 34, "text-anchor": "middle" }, title);
}

function up(chart, y, values, title) {
  for (const value of values) {
    add(chart, "line", { class: "grid", x1: AREA.left, x2: AREA.right, y1: y(value), y2: y(value) });
    add(chart, "text", { x: AREA.left - 8, y: y(value) + 4, "text-anchor": "end" }, value);
  }
  const middle = (AREA.top + AREA.bottom) / 2;
  add(chart, "text", { x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` }, title);
}

function powers(base, low, high) {
  const found = [];
  for (let exponent = Math.ceil(Math.log(low) / Math.log(base) - 1e-9); base ** exponent <= high * 1.0001; exponent++)
    found.push(Number((base ** exponent).toPrecision(6)));
  return found;
}

// The numbers 1, 2 and 5 times a power of ten.
const ticks = (low, high) => [1, 2, 5].flatMap((first) => powers(10, low / first, high / first).map((power) => Number((first * power).toPrecision(6))))
  .sort((one, other) => one - other);

// --- entropy over context length ---

const curves = document.getElementById("curves");
const chooser = document.getElementById("layer");
const color = (head, heads) => `hsl(${(360 * head) / heads} 70% 55%)`;
const last = data.length.length - 1;
const curveX = placeAcross(1, data.length[last]);
const highest = [...data.uniform.flat(), ...data.entropy.flat(2)].reduce((most, value) => Math.max(most, value));
const curveY = placeUp(0, highest * 1.04, (value) => value);
const path = (values) => values.map((value, point) => `${point ? "L" : "M"}${curveX(data.length[point]).toFixed(1)} ${curveY(value).toFixed(1)}`).join("");

function deviation(layer) {
  const heads = data.entropy[layer];
  return data.length.map((_, point) => {
    const values = heads.map((head) => head[point]);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    return [mean, Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length)];
  });
}

function drawCurves(layer, chosen) {
  curves.replaceChildren();
  across(curves, curveX, powers(2, 1, data.length[last]), "context length n (tokens that the query sees)");
  up(curves, curveY, Array.from({ length: Math.floor(highest) + 1 }, (_, value) => value), "entropy (nats)");
  if (data.trained) {
    const x = curveX(data.trained);
    add(curves, "line", { class: "trained", x1: x, x2: x, y1: AREA.top, y2: AREA.bottom });
    add(curves, "text", { x: x + 4, y: AREA.bottom - 6 }, "trained context");
  }
  const spread = deviation(layer);
  const edge = (sign) => spread.map(([mean, width]) => mean + sign * width);
  const back = edge(-1).map((value, point) => `L${curveX(data.length[point])} ${curveY(value)}`).reverse().join("");
  add(curves, "path", { class: "band", d: `${path(edge(1))}${back}Z` });
  data.entropy[layer].forEach((values, head, heads) =>
    add(curves, "path", { class: head === chosen ? "head near" : "head", d: path(values), stroke: color(head, heads.length) }));
  add(curves, "path", { class: "mean", d: path(spread.map(([mean]) => mean)) });
  add(curves, "path", { class: "limit", d: path(data.uniform[layer]) });
  add(curves, "text", { x: AREA.right - 60, y: curveY(data.uniform[layer][last]) + 4, "text-anchor": "end" }, "ln n");
  chooser.value = layer;
  for (const cell of document.querySelectorAll(".heat rect"))
    cell.classList.toggle("chosen", Number(cell.dataset.layer) === layer && (chosen === undefined || Number(cell.dataset.head) === chosen));
}

chooser.addEventListener("change", () => drawCurves(Number(chooser.value)));
for (const cell of document.querySelectorAll(".heat rect"))
  cell.addEventListener("click", () => drawCurves(Number(cell.dataset.layer), Number(cell.dataset.head)));

curves.addEventListener("pointermove", (event) => {
  const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(curves.getScreenCTM().inverse());
  const nearest = (values, target) => values.reduce((best, value, index) =>
    Math.abs(value - target) < Math.abs(values[best] - target) ? index : best, 0);
  const point = nearest(data.length.map(curveX), place.x);
  const layer = Number(chooser.value);
  const head = nearest(data.entropy[layer].map((values) => curveY(values[point])), place.y);
  curves.querySelectorAll(".head").forEach((line, index) => line.classList.toggle("near", index === head));
  document.getElementById("at").textContent = `head ${head}, n = ${Math.round(data.length[point])}: entropy `
    + `${data.entropy[layer][head][point].toFixed(3)} nats, ln n = ${data.uniform[layer][point].toFixed(3)}`;
});
drawCurves(data.first);

// --- logit spread and its bound ---

const heads = [...document.querySelectorAll("tbody tr")].map((row) => ({
  name: `layer ${row.cells[0].textContent}, head ${row.cells[1].textContent}`,
  spread: Number(row.dataset.spread), bound: Number(row.dataset.bound),
})).filter((head) => head.spread > 0 && head.bound > 0);
const spreadChart = document.getElementById("spread");
if (spreadChart && heads.length) {
  const left = Math.min(...heads.map((head) => head.bound)) * 0.8;
  const low = Math.min(...heads.map((head) => head.spread)) * 0.8;
  const high = Math.max(...heads.map((head) => head.bound)) * 1.25;
  const x = placeAcross(left, high), y = placeUp(low, high, Math.log);
  across(spreadChart, x, ticks(left, high), "bound of Proposition 3.1");
  up(spreadChart, y, ticks(low, high), "logit spread");
  add(spreadChart, "path", { class: "limit", d: `M${x(left)} ${y(left)}L${x(high)} ${y(high)}` });
  for (const head of heads) {
    const dot = add(spreadChart, "circle", { class: "dot", cx: x(head.bound), cy: y(head.spread), r: 5 });
    add(dot, "title", {}, `${head.name}: spread ${head.spread.toFixed(2)}, bound ${head.bound.toFixed(2)}`);
  }
}

// --- attention maps ---

function unpack(map) {
  const bytes = Uint8Array.from(atob(map.steps), (character) => character.charCodeAt(0));
  const steps = new Uint16Array(bytes.buffer);
  const rows = [];
  let start = 0;
  for (const query of map.queries) {
    const count = Math.floor(query / map.group) + 1;
    rows.push(steps.subarray(start, start + count));
    start += count;
  }
  return rows;
}

// The colour of a weight: 0 for weights up to the smallest shown, 1 for the largest, logarithmic in between.
const strength = (map, step) => step === 0 ? 0
  : Math.max(0.02, 1 - Math.log((map.peak * step) / 65535 / map.peak) / Math.log(data.smallest / map.peak));
const ramp = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(" ").map(Number);
const number = (map, step) => step === 0 ? "0" : step === 1 ? `below ${(map.peak / 65535).toPrecision(2)}` : ((map.peak * step) / 65535).toPrecision(3);
const shown = (index) => `${index} "${data.pieces[index].replaceAll("\n", "\\n")}"`;

function drawMap(canvas, map) {
  const size = map.queries.length;
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  const low = ramp("--low"), high = ramp("--high");
  map.rows.forEach((row, y) => row.forEach((step, x) => {
    if (step === 0) return;
    const share = strength(map, step);
    const cell = 4 * (y * size + x);
    for (let channel = 0; channel < 3; channel++)
      image.data[cell + channel] = low[channel] + share * (high[channel] - low[channel]);
    image.data[cell + 3] = 255;
  }));
  context.putImageData(image, 0, 0);
}

function writeText(figure, map, row) {
  const query = map.queries[row], low = ramp("--low"), high = ramp("--high");
  const words = data.pieces.map((piece, index) => {
    const word = document.createElement("span");
    word.textContent = piece;
    if (index > query) word.className = "later";
    else {
      const share = strength(map, map.rows[row][Math.floor(index / map.group)]);
      const mixed = low.map((value, channel) => Math.round(value + share * (high[channel] - value)));
      if (share > 0) word.style.background = `rgb(${mixed.join(" ")})`;
      if (share > 0.55) word.style.color = "var(--card)";
      if (index === query) word.classList.add("query");
    }
    return word;
  });
  const text = figure.querySelector(".text");
  text.replaceChildren(...words);
  text.scrollTop = words[query].offsetTop - text.offsetTop - text.clientHeight / 2;
}

for (const canvas of document.querySelectorAll("canvas")) {
  const map = data.maps[Number(canvas.dataset.map)], figure = canvas.parentElement;
  map.rows = unpack(map);
  let current = map.queries.length - 1;
  const draw = () => { drawMap(canvas, map); writeText(figure, map, current); };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), size = map.queries.length;
    const place = (offset, length) => Math.min(size - 1, Math.max(0, Math.floor((offset / length) * size)));
    const row = place(event.clientY - box.top, box.height), column = place(event.clientX - box.left, box.width);
    const key = column * map.group;
    const step = map.rows[row][column];
    figure.querySelector(".values").textContent = `token ${shown(map.queries[row])}`
      + (step === undefined ? " comes before that one" : ` looks at ${shown(key)}: ${number(map, step)}`);
    if (row !== current) writeText(figure, map, (current = row));
  });
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

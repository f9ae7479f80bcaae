// Colours of normalized entropies, and a map of them: a rectangle for every layer and head.

// Cividis (Nuñez, Anderton and Renslow 2018): perceptually uniform, and the same to people who see red and green alike.
const CIVIDIS = [
  [0, 34, 78], [0, 46, 106], [26, 56, 111], [50, 67, 109], [67, 78, 108], [83, 90, 109],
  [97, 101, 111], [111, 112, 115], [125, 124, 120], [140, 136, 120], [155, 148, 118], [171, 160, 114],
  [188, 174, 108], [205, 187, 99], [222, 201, 88], [240, 216, 70], [254, 232, 56],
];
const LABEL_LEFT = 34, LABEL_TOP = 20;
const find = (id) => document.getElementById(id);

function colour(value) {
  const place = Math.min(Math.max(value, 0), 1) * (CIVIDIS.length - 1);
  const low = Math.min(Math.floor(place), CIVIDIS.length - 2);
  const mixed = CIVIDIS[low].map((part, index) => Math.round(part + (CIVIDIS[low + 1][index] - part) * (place - low)));
  return `rgb(${mixed.join(" ")})`;
}

function made(name, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

class HeadMap {
  // `choose(layer, head)` is called when a head is pointed at, clicked or reached by an arrow key, and with null when it is left.
  constructor(svg, choose, { onPoint, tallest }) {
    this.svg = svg;
    this.tallest = tallest;  // pixels of a rectangle
    this.choose = choose;
    this.chosen = null;
    this.cells = [];
    svg.addEventListener(onPoint ? "pointerover" : "click", (event) => {
      const { layer, head } = event.target.dataset;
      if (layer !== undefined) this.choose(Number(layer), Number(head));
    });
    if (onPoint) {
      svg.addEventListener("pointerleave", () => this.choose(null));
      svg.addEventListener("blur", () => this.choose(null));
    }
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (event.key === "Escape") this.choose(null);
      if (!(event.key in moves) || this.cells.length === 0) return;
      event.preventDefault();
      const [down, right] = moves[event.key], { layer, head } = this.chosen ?? { layer: 0, head: 0 };
      const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
      this.choose(within(layer + down, this.cells.length), within(head + right, this.cells[0].length));
    });
  }

  // Show values [layers][heads], null where there is none; `dispersed` [layers][heads] are framed. Their number is returned.
  show(values, layers, heads, dispersed = null) {
    if (this.cells.length !== layers || this.cells[0].length !== heads) this.layOut(layers, heads);
    const marked = [];
    this.cells.forEach((row, layer) => row.forEach((cell, head) => {
      const value = values?.[layer][head] ?? null;
      cell.setAttribute("fill", value === null ? "var(--empty)" : colour(value));
      const framed = dispersed?.[layer][head] ?? false;
      cell.classList.toggle("dispersed", framed);
      if (framed) marked.push(cell);
    }));
    this.svg.append(...marked);  // painted last, or their neighbours would cover the frames
    return marked.length;
  }

  // Frame the chosen head; its rectangle, or null.
  mark() {
    for (const cell of this.svg.querySelectorAll(".chosen")) cell.classList.remove("chosen");
    const cell = this.chosen === null ? null : this.cells[this.chosen.layer]?.[this.chosen.head] ?? null;
    cell?.classList.add("chosen");
    if (cell !== null) this.svg.append(cell);
    return cell;
  }

  layOut(layers, heads) {
    const style = getComputedStyle(this.svg.parentElement);
    const width = this.svg.parentElement.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    const cellWidth = (width - LABEL_LEFT - 2) / heads;  // a frame needs room at the right
    const cellHeight = Math.max(Math.min(cellWidth, this.tallest), 8);
    const height = LABEL_TOP + layers * cellHeight + 2;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.style.height = `${height}px`;
    this.svg.replaceChildren();
    const everyHead = Math.ceil(20 / cellWidth), everyLayer = Math.ceil(12 / cellHeight);
    this.svg.append(made("text", { x: 0, y: 12 }, "layer"));
    for (let head = 0; head < heads; head += everyHead) {
      const x = LABEL_LEFT + (head + 0.5) * cellWidth;
      this.svg.append(made("text", { x, y: 12, "text-anchor": "middle" }, head === 0 && cellWidth > 44 ? "head 0" : head));
    }
    this.cells = [];
    for (let layer = 0; layer < layers; layer++) {
      const y = LABEL_TOP + layer * cellHeight;
      if (layer % everyLayer === 0) {
        this.svg.append(made("text", { x: LABEL_LEFT - 6, y: y + cellHeight / 2 + 4, "text-anchor": "end" }, layer));
      }
      this.cells.push([]);
      for (let head = 0; head < heads; head++) {
        const x = LABEL_LEFT + head * cellWidth;
        const cell = made("rect", { x, y, width: cellWidth, height: cellHeight });
        cell.dataset.layer = layer;
        cell.dataset.head = head;
        this.cells[layer].push(this.svg.appendChild(cell));
      }
    }
  }
}

// What one head does with the tokens of a request: every token shaded by the weight that a query gives it.

const LARGEST_NAMED = 5;
const short = (weight) => String(Number(weight.toPrecision(3)));
const quoted = (text) => `“${text.replaceAll("\n", "⏎")}”`;

class TokenWeights {
  // `choose(position)` is called when a token is clicked, or Enter is pressed on it.
  constructor(section, choose) {
    [this.asks, this.list, this.pointed, this.largest, this.scale] =
      [".asks", ".tokens", ".pointed", ".largest", ".scale"].map((one) => section.querySelector(one));
    this.section = section;
    this.requested = null;  // the next row: tokens, layer, head, position
    this.busy = false;
    this.row = null;
    this.active = null;  // the position that the keyboard is at
    const positionOf = (event) => event.target.dataset.position === undefined ? null : Number(event.target.dataset.position);
    this.list.addEventListener("click", (event) => {
      if (positionOf(event) !== null) choose(positionOf(event));
    });
    this.list.addEventListener("pointerover", (event) => this.point(positionOf(event)));
    this.list.addEventListener("pointerleave", () => this.point(null));
    this.list.addEventListener("blur", () => this.activate(null));
    this.list.addEventListener("keydown", (event) => {
      if (this.row === null) return;
      const last = this.row.tokens.length - 1, from = this.active ?? this.row.position;
      const to = { ArrowLeft: from - 1, ArrowUp: from - 1, ArrowRight: from + 1, ArrowDown: from + 1, Home: 0, End: last }[event.key];
      if (to !== undefined) this.activate(Math.min(Math.max(to, 0), last));
      else if (event.key === "Enter" || event.key === " ") choose(from);
      else return;
      event.preventDefault();
    });
  }

  hide() {
    this.section.hidden = true;
    this.requested = this.row = null;
  }

  // Show a row once the server has computed it; of those that are requested meanwhile only the last.
  async show(requested) {
    this.section.hidden = false;
    this.requested = requested;
    if (this.busy) return;
    this.busy = true;
    this.section.setAttribute("aria-busy", "true");
    while (this.requested !== null) {
      const now = this.requested;
      this.asks.textContent = "Computing the weights …";
      const result = await this.load(now).catch((error) => ({ error: error.message }));
      if (this.requested === now) {
        this.requested = null;
        if (result.error === undefined) this.draw({ ...now, ...result });
        else this.refuse(result.error);
      }
    }
    this.busy = false;
    this.section.removeAttribute("aria-busy");
  }

  async load({ tokens, layer, head, position }) {
    const response = await fetch("attention", {
      method: "POST", headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({ model: state.model.served_name, tokens, layer, head, position }),
    });
    const said = await response.json().catch(() => null);
    if (!response.ok || said === null) {
      throw new Error(said?.error?.message ?? `the server responded with status ${response.status} and no weights`);
    }
    return said;
  }

  // A sentence in place of the weights.
  refuse(sentence) {
    this.section.hidden = false;
    this.row = null;
    this.asks.textContent = sentence;
    this.list.replaceChildren();
    for (const one of [this.list, this.pointed, this.largest, this.scale]) one.hidden = true;
  }

  draw(row) {
    this.row = row;
    for (const one of [this.list, this.pointed, this.largest, this.scale]) one.hidden = false;
    const { tokens, position, first, weights } = row;
    const top = Math.max(...weights), zeros = weights.filter((weight) => weight === 0).length;
    this.list.classList.toggle("sparse", zeros > 0);
    this.scale.querySelector(".underlined").hidden = zeros === 0;
    this.list.replaceChildren(...tokens.map((text, at) => {
      const element = document.createElement("span"), weight = this.weightOf(at);
      element.setAttribute("role", "option");
      element.setAttribute("aria-selected", at === position);
      element.setAttribute("aria-label", this.described(at));
      element.id = `${this.list.id}-${at}`;
      element.dataset.position = at;
      element.textContent = text.replaceAll("\n", "⏎\n") || "·";
      element.className = weight === null ? "unseen" : weight > 0 ? "weighted" : "";
      element.style.setProperty("--share", top > 0 ? Math.sqrt((weight ?? 0) / top).toFixed(3) : "0");
      return element;
    }));
    this.list.removeAttribute("aria-activedescendant");
    const next = tokens[position + 1];
    const before = next === undefined ? "" : `, before ${quoted(next)}`;
    const sum = weights.reduce((all, one) => all + one, 0);
    const sums = Math.abs(sum - 1) > 1e-4 ? ` They sum to ${short(sum)}.` : "";
    const sink = row.sink_mass > 0 ? ` The attention sink takes ${short(row.sink_mass)}.` : "";
    this.asks.textContent = `Layer ${row.layer}, head ${row.head} at ${quoted(tokens[position])}, position ${position}${before}: ` +
      `${weights.length - zeros} of ${weights.length} tokens have weight, H / ln n is ${row.normalized_entropy.toFixed(3)}.${sums}${sink}`;
    const order = weights.map((weight, at) => [weight, first + at]).sort((one, other) => other[0] - one[0]);
    this.largest.replaceChildren(...order.slice(0, LARGEST_NAMED).filter(([weight]) => weight > 0).map(([weight, at]) => {
      const item = document.createElement("li");
      item.textContent = `${short(weight)} ${quoted(tokens[at])} at ${at}`;
      return item;
    }));
    const ticks = this.scale.querySelectorAll(".ticks span");
    [0, top / 4, top].forEach((weight, index) => ticks[index].textContent = short(weight));
    this.list.scrollTop = this.list.children[position].offsetTop - this.list.clientHeight / 2;
    this.activate(document.activeElement === this.list && this.active !== null ? Math.min(this.active, tokens.length - 1) : null);
  }

  // The weight of the token at a position; null where the query does not see it.
  weightOf(at) {
    return this.row.weights[at - this.row.first] ?? null;
  }

  described(at) {
    const weight = this.weightOf(at), { position } = this.row;
    const says = weight !== null ? `weight ${short(weight)}` : at > position ? "comes later" : "beyond the window of this layer";
    return `${quoted(this.row.tokens[at])}, position ${at}: ${says}`;
  }

  point(at) {
    this.pointed.textContent = at === null || this.row === null
      ? "Point at a token for its weight; choose it to see the weights that it gives." : `${this.described(at)}.`;
  }

  activate(at) {
    for (const element of this.list.querySelectorAll(".active")) element.classList.remove("active");
    this.active = at;
    this.point(at);
    const element = at === null ? undefined : this.list.children[at];
    if (element === undefined) return this.list.removeAttribute("aria-activedescendant");
    element.classList.add("active");
    element.scrollIntoView({ block: "nearest" });
    this.list.setAttribute("aria-activedescendant", element.id);
  }
}

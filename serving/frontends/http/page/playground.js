// Requests that the page sends: the completion as it comes, the entropy of every head at each of its tokens, and on
// demand what a head does with all tokens.

const CURVE = { height: 110, left: 26, right: 6, top: 8, bottom: 18 };

class PlaygroundRequest {
  static made = 0;

  constructor() {
    this.form = find("request").content.firstElementChild.cloneNode(true);
    find("requests").append(this.form);
    [this.output, this.error, this.says, this.curve] =
      [".output", ".error", ".says", ".curve"].map((one) => this.form.querySelector(one));
    this.fields = this.form.elements;
    this.map = new HeadMap(this.form.querySelector(".heads"), (layer, head) => {
      this.map.chosen = layer === null ? null : { layer, head };
      this.showHeads();
      this.showWeights(this.token === null ? null : this.tokens[this.token].position);
    }, { onPoint: false, tallest: 14 });
    this.weights = new TokenWeights(this.form.querySelector(".attention"), (position) => this.showWeights(position));
    this.form.querySelector(".tokens").id = `tokens-${PlaygroundRequest.made++}`;
    this.clear();
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.generate();
    });
    this.fields.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    this.fields.stop.addEventListener("click", () => this.stopped?.abort());
    this.output.addEventListener("pointerover", (event) => this.chooseToken(event.target.dataset.token ?? null));
    this.output.addEventListener("pointerleave", () => this.chooseToken(null));
    this.output.addEventListener("click", () => this.showWeightsOfChosen());
    this.output.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.chooseToken(null);
      if (event.key === "Enter") this.showWeightsOfChosen();
      if (!step || this.tokens.length === 0) return;
      event.preventDefault();
      const from = this.token ?? this.tokens.length - (step < 0 ? 0 : 1);
      this.chooseToken(Math.min(Math.max(from + step, 0), this.tokens.length - 1));
    });
  }

  offer(chat) {
    this.form.querySelector(".mode").hidden = !chat;
    if (!chat) this.fields.mode.value = "text";
    for (const name of ["temperature", "top_p"]) {
      const value = state.model.sampling[name];
      this.fields[name].placeholder = value;
      this.fields[name].title = `${value} unless you say otherwise (${state.model.sampling_source ?? "the server's default"})`;
    }
  }

  clear() {
    this.tokens = [];  // position and element of each, entropies [layers][heads] of the query it was sampled after, their mean
    this.token = null;  // the chosen one; null is the last
    this.ids = [];  // of prompt and completion
    this.weights.hide();
    this.output.replaceChildren();
    this.error.hidden = true;
    this.says.textContent = "";
  }

  body() {
    const { prompt, mode } = this.fields;
    const body = { model: state.model.served_name, stream: true, attention_stats: "tokens", return_token_ids: true };
    for (const name of ["max_tokens", "temperature", "top_p", "seed"]) {
      if (this.fields[name].value !== "") body[name] = Number(this.fields[name].value);
    }
    const said = mode.value === "chat" ? { messages: [{ role: "user", content: prompt.value }] } : { prompt: prompt.value };
    return { ...body, ...said };
  }

  async generate() {
    if (this.form.dataset.running === "true") return;  // Ctrl+Enter submits also where the button is off
    this.clear();
    this.stopped = new AbortController();
    this.running(true);
    const began = performance.now();
    try {
      const path = this.fields.mode.value === "chat" ? "v1/chat/completions" : "v1/completions";
      const response = await fetch(path, {
        method: "POST", signal: this.stopped.signal, body: JSON.stringify(this.body()),
        headers: { "Content-Type": "application/json", ...headers() },
      });
      if (!response.ok) {
        const said = await response.json().catch(() => null);
        throw new Error(said?.error?.message ?? `the server responded with status ${response.status}`);
      }
      await this.read(response.body);
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error.message);
    }
    this.seconds = (performance.now() - began) / 1000;
    this.running(false);
    this.showHeads();
    this.showWeights(this.weights.row === null || this.follows ? null : this.weights.row.position);
  }

  async read(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", part = await reader.read();
    for (; !part.done; part = await reader.read()) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: {")) this.take(JSON.parse(line.slice(6)));
      }
      this.showHeads();
    }
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    const [choice] = chunk.choices;
    if (choice === undefined) return;
    const text = choice.text ?? `${choice.delta.reasoning_content ?? ""}${choice.delta.content ?? ""}`;
    this.ids.push(...choice.prompt_token_ids ?? chunk.prompt_token_ids ?? [], ...choice.token_ids ?? []);
    const element = document.createElement("span");
    element.textContent = text;
    const { positions, normalized_entropy: entropies } = choice.attention_stats ?? {};
    if (positions !== undefined) {
      element.dataset.token = this.tokens.length;
      positions.forEach((position, index) => {
        const entropy = entropies[index], all = entropy.flat().filter((value) => value !== null);
        this.tokens.push({ position, element, entropy, mean: all.reduce((sum, one) => sum + one, 0) / all.length });
      });
    }
    const atEnd = this.output.scrollTop + this.output.clientHeight > this.output.scrollHeight - 30;
    this.output.append(element);
    if (atEnd) this.output.scrollTop = this.output.scrollHeight;
  }

  fail(sentence) {
    this.error.textContent = sentence;
    this.error.hidden = false;
  }

  running(whether) {
    this.fields.stop.disabled = !whether;
    this.form.querySelector("[type=submit]").disabled = whether;
    this.form.dataset.running = whether;
    for (const spoken of [this.output, this.says]) spoken.setAttribute("aria-busy", whether);  // said once, at the end
  }

  chooseToken(index) {
    this.token = index === null ? null : Number(index);
    this.showHeads();
  }

  showWeightsOfChosen() {
    if (this.token !== null) this.showWeights(this.tokens[this.token].position);
  }

  // The weights that the chosen head gives at a position; null is where the last token was sampled.
  showWeights(position) {
    const chosen = this.map.chosen;
    if (chosen === null) return this.weights.hide();
    if (this.tokens.length === 0) return;
    if (state.model.attention_refusal !== null) return this.weights.refuse(state.model.attention_refusal);
    this.follows = position === null;
    this.weights.show({ tokens: [...this.ids], ...chosen, position: position ?? this.tokens.at(-1).position });
  }

  // The entropy of the chosen head, or the mean of all heads.
  entropyOf(token) {
    const chosen = this.map.chosen;
    return chosen === null ? token.mean : token.entropy[chosen.layer][chosen.head];
  }

  showHeads() {
    const none = this.tokens.length === 0;
    this.map.svg.toggleAttribute("hidden", none);
    this.curve.toggleAttribute("hidden", none);
    if (none) return;
    const token = this.tokens[this.token ?? this.tokens.length - 1];
    this.map.show(token.entropy, token.entropy.length, token.entropy[0].length);
    this.map.mark();
    for (const one of this.tokens) {
      one.element.style.borderBottomColor = colour(this.entropyOf(one));
      one.element.classList.toggle("chosen", this.token !== null && one === token);
    }
    const { layer, head } = this.map.chosen ?? {};
    const whose = layer === undefined ? "mean of all heads (choose one in the map)" : `layer ${layer}, head ${head}`;
    const speed = this.form.dataset.running === "true" ? "" : `, ${(this.tokens.length / this.seconds).toFixed(1)} tokens/s`;
    this.says.textContent = `${this.tokens.length} tokens${speed}. H / ln n at position ${token.position}, ` +
      `${whose}: ${this.entropyOf(token).toFixed(3)}.`;
    this.map.svg.setAttribute("aria-label", `Normalized entropy of every head at position ${token.position}`);
    this.curve.setAttribute("aria-label", `Normalized entropy by position, ${whose}`);
    this.showCurve(token);
  }

  showCurve(token) {
    const { height, left, right, top, bottom } = CURVE, width = this.output.clientWidth;
    const first = this.tokens[0].position, last = this.tokens[this.tokens.length - 1].position;
    const x = (position) => left + (width - left - right) * (last === first ? 0.5 : (position - first) / (last - first));
    const y = (value) => top + (height - top - bottom) * (1 - value);
    this.curve.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const line = (x1, y1, x2, y2, name = "") => made("line", { x1, y1, x2, y2, class: name });
    const points = this.tokens.map((one) => `${x(one.position).toFixed(1)},${y(this.entropyOf(one)).toFixed(1)}`);
    this.curve.replaceChildren(
      line(left, y(0), width - right, y(0)), line(left, y(1), width - right, y(1)),
      made("text", { x: left - 6, y: y(1) + 4, "text-anchor": "end" }, "1"),
      made("text", { x: left - 6, y: y(0) + 4, "text-anchor": "end" }, "0"),
      made("text", { x: left, y: height - 4 }, `position ${first}`),
      made("text", { x: width - right, y: height - 4, "text-anchor": "end" }, last),
      line(x(token.position), y(0), x(token.position), y(1), "chosen"),
      made("polyline", { points: points.join(" ") }),
    );
  }
}

const requests = [];

// Once the server is known: what it can do.
function showRequests() {
  find("try").hidden = !state.model.generates;
  if (!state.model.generates) return;
  if (requests.length === 0) requests.push(new PlaygroundRequest());
  for (const one of requests) one.offer(state.model.chat);
}

find("compare").addEventListener("click", () => {
  if (requests.length === 2) {
    const second = requests.pop();
    second.stopped?.abort();
    second.form.remove();
  } else {
    requests.push(new PlaygroundRequest());
    for (const name of ["prompt", "max_tokens", "temperature", "top_p", "seed"]) {
      requests[1].fields[name].value = requests[0].fields[name].value;
    }
  }
  find("compare").setAttribute("aria-pressed", requests.length === 2);
  find("compare").textContent = requests.length === 2 ? "One request" : "Compare two requests";
  showRequests();
  for (const one of requests) {
    one.map.cells = [];
    one.showHeads();
  }
});
addEventListener("resize", () => requests.forEach((one) => {
  one.map.cells = [];
  one.showHeads();
}));

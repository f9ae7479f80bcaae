// The state of the server, read once a second: tiles of numbers, and the map of all requests' heads.

const POLL_MILLISECONDS = 1000, KEPT = 120;
const tip = find("tip");
let state = null, before = null, reveal = false, updates = 0, token = "";

// The increase of a counter since the last poll.
const grown = (name) => before === null ? null : state.numbers[name] - before.numbers[name];
const perSecond = (name) => before === null ? null : grown(name) / (state.time - before.time);
function meanOf(name) {
  const count = grown(`${name}_count`);
  return count ? 1000 * grown(`${name}_sum`) / count : null;
}

// [name, unit, value, digits, the top of its curve or null for its own largest value]
const TILES = [
  ["Generated", "tokens/s", () => perSecond("generated_tokens_total"), 1, null],
  ["Prompts read", "tokens/s", () => perSecond("prompt_tokens_total"), 1, null],
  ["Running", "requests", () => state.numbers.requests_running, 0, null],
  ["Waiting", "requests", () => state.numbers.requests_waiting, 0, null],
  ["KV cache held", "%", () => 100 * state.numbers.kv_cache_usage_ratio, 1, 100],
  ["Time to first token", "ms", () => meanOf("time_to_first_token_seconds"), 0, null],
  ["Between tokens", "ms", () => meanOf("inter_token_latency_seconds"), 1, null],
].map(([name, unit, value, digits, top]) => {
  const tile = document.createElement("div"), term = document.createElement("dt"), shown = document.createElement("dd");
  const curve = made("svg", { viewBox: `0 0 ${KEPT - 1} 30`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const line = curve.appendChild(made("polyline"));
  tile.className = "tile panel";
  term.textContent = name;
  shown.textContent = "–";
  tile.append(term, shown);
  shown.append(curve);
  find("tiles").append(tile);
  return { value, digits, unit, top, shown, curve, line, history: [] };
});

function showTiles() {
  for (const tile of TILES) {
    const value = tile.value();
    tile.history.push(value);
    if (tile.history.length > KEPT) tile.history.shift();
    const unit = document.createElement("small");
    unit.textContent = ` ${tile.unit}`;
    const known = tile.history.findLast((one) => one !== null);
    tile.shown.replaceChildren(known === undefined ? "–" : known.toFixed(tile.digits), unit, tile.curve);
    const top = tile.top ?? Math.max(1e-9, ...tile.history);
    const start = KEPT - tile.history.length;
    const points = tile.history.flatMap((one, index) => one === null ? [] : [`${start + index},${28 - 26 * one / top}`]);
    tile.line.setAttribute("points", points.join(" "));
  }
}

const map = new HeadMap(find("map"), choose, { onPoint: true, tallest: 28 });

function showMap() {
  const attention = state.attention;
  map.svg.toggleAttribute("hidden", attention === null);
  find("legend").toggleAttribute("hidden", attention === null);
  if (attention === null) {
    find("note").textContent = "Statistics are off: the server was started with --attention-metrics off.";
    return;
  }
  const { layers, heads } = state.model;
  find("note").textContent = attention.tokens
    ? `Mean over ${attention.tokens} tokens, those of the last ${attention.window} collected steps. Point at a head for more.`
    : "No tokens yet: the map fills when a request completes.";
  const dispersed = map.show(attention.normalized_entropy, layers, heads, attention.dispersed);
  find("dispersed").textContent = `dispersed: ${dispersed} of ${layers * heads} heads, ` +
    `at ${attention.threshold} or above for ${attention.dispersion_tokens} tokens`;
  showTip();
}

function showTip() {
  const cell = map.mark(), chosen = map.chosen;
  tip.toggleAttribute("hidden", cell === null);
  if (cell === null) return;
  if (reveal) cell.scrollIntoView({ block: "center" });
  reveal = false;
  const at = (name) => state.attention[name]?.[chosen.layer][chosen.head] ?? null;
  const number = (value, digits, unit = "") => value === null ? "–" : value.toFixed(digits) + unit;
  const percent = (name) => at(name) === null ? null : 100 * at(name);
  const crossing = at("crossing");
  const rows = [
    ["Normalized entropy", number(at("normalized_entropy"), 3)],
    ["Entropy", number(at("entropy_nats"), 3, " nats")],
    ["Support", number(percent("support_ratio"), 1, " % of keys")],
    ["Inverse temperature", number(at("inverse_temperature"), 3)],
    ["Logit spread", number(at("logit_spread"), 2)],
    [`Smoothed, over ${state.attention.least_context} keys`, number(at("smoothed"), 3)],
    ["Dispersed", at("dispersed") ? "yes" : "no"],
    [`At ${state.attention.threshold} or above`, crossing === null ? "at no length" : `beyond ${crossing} tokens`],
  ];
  if (state.attention.sink_mass) rows.push(["Attention sink", number(percent("sink_mass"), 1, " % of the weights")]);
  if (state.attention.drift !== null) rows.push(["Drift from the baseline (PSI)", number(at("drift"), 3)]);
  const table = document.createElement("table");
  for (const [name, value] of rows) {
    const row = table.insertRow(), head = document.createElement("th");
    head.textContent = name;
    row.append(head);
    row.insertCell().textContent = value;
  }
  const title = document.createElement("strong");
  title.textContent = `Layer ${chosen.layer}, head ${chosen.head}`;
  tip.replaceChildren(title, table);
  const box = cell.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.right + 8, document.documentElement.clientWidth - tip.offsetWidth - 8));
  let top = box.bottom + 8;
  if (top + tip.offsetHeight > innerHeight && box.top - 8 - tip.offsetHeight > 0) top = box.top - 8 - tip.offsetHeight;
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${top + scrollY}px`;
}

function choose(layer, head) {
  map.chosen = layer === null ? null : { layer, head };
  if (state?.attention) showTip();
}

// A link to /#2.5 opens layer 2, head 5.
function chooseByAddress() {
  const found = /^#(\d+)\.(\d+)$/.exec(location.hash);
  reveal = found !== null;
  choose(found ? Number(found[1]) : null, found ? Number(found[2]) : null);
}

addEventListener("hashchange", chooseByAddress);
addEventListener("resize", () => {
  if (state === null) return;
  map.cells = [];
  showMap();
});

// What every request of the page carries.
const headers = () => token ? { Authorization: `Bearer ${token}` } : {};

find("access").addEventListener("submit", (event) => {
  event.preventDefault();
  token = event.target.elements.token.value.trim();
  find("access").hidden = true;
});

async function poll() {
  try {
    const response = await fetch("live", { cache: "no-store", headers: headers() });
    if (response.status === 401) find("access").hidden = false;
    if (!response.ok) throw new Error(`status ${response.status}`);
    before = state;
    state = await response.json();
    const count = "prompt_tokens_total";
    if (before !== null && before.numbers[count] > state.numbers[count]) before = null;  // the server started anew
    const { name, norm, layers, heads } = state.model;
    document.title = `${name} – Sharp`;
    find("model").textContent = name;
    find("about").textContent = `${norm} attention, ${layers} × ${heads} heads`;
    showTiles();
    showMap();
    if (before === null) showRequests();
    updates += 1;
    document.body.dataset.updates = updates;
    connected(true);
  } catch (error) {
    connected(false);
    console.error(error);
  }
  setTimeout(poll, POLL_MILLISECONDS);
}

function connected(live) {
  find("connection").textContent = live ? "live" : "no connection";
  find("connection").className = live ? "live" : "lost";
}

find("ramp").style.background = `linear-gradient(90deg, ${CIVIDIS.map((part) => `rgb(${part.join(" ")})`).join(", ")})`;
chooseByAddress();
poll();

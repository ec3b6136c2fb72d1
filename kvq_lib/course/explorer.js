// The explorer on the page: reads the controls, shows what explorer_math.js computes.

// Matplotlib's cividis: steadily brighter, the same for colour-blind readers.
const CIVIDIS = [
  [0, 34, 78], [26, 56, 111], [67, 78, 108], [97, 101, 111], [125, 124, 120],
  [155, 148, 118], [188, 174, 108], [222, 201, 88], [254, 232, 56],
];

// The colour of a share between 0 and 1.
function colour(share) {
  const place = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const low = Math.min(CIVIDIS.length - 2, Math.floor(place));
  return [0, 1, 2].map((c) =>
    CIVIDIS[low][c] + (place - low) * (CIVIDIS[low + 1][c] - CIVIDIS[low][c]));
}

// Fill a canvas of whole cells: shareAt(x, y) is a share between 0 and 1.
function paint(canvas, width, height, shareAt) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let y = 0; y < height; y++)
    for (let x = 0; x < width; x++)
      image.data.set([...colour(shareAt(x, y)), 255], 4 * (y * width + x));
  context.putImageData(image, 0, 0);
}

function inBytes(amount) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  // Compare what will be printed: 1023.999 KiB is 1.00 MiB.
  while (unit < 4 && Number(amount.toFixed(2)) >= 1024) {
    amount /= 1024;
    unit++;
  }
  return `${unit ? amount.toFixed(2) : amount} ${units[unit]}`;
}

const count = (n) => n.toLocaleString("en-US");
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;
const sequences = (n) => `${count(n)} ${n === 1 ? "sequence" : "sequences"}`;

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Rows of a table: a heading, then cells; [text, exact number] keeps the number.
function fillRows(body, rows, chosen) {
  body.replaceChildren(...rows.map(([head, ...cells], i) => {
    const row = element("tr");
    if (i === chosen) row.className = "kvqx-chosen";
    row.append(element("th", head, { scope: "row" }));
    for (const cell of cells) {
      const [text, exact] = Array.isArray(cell) ? cell : [cell];
      row.append(element("td", text, exact === undefined ? {} : { "data-exact": exact }));
    }
    return row;
  }));
}

function fillBar(bar, parts, whole, words) {
  bar.replaceChildren(...parts.filter(([, bytes]) => bytes > 0).map(([name, bytes]) => {
    const piece = element("i", undefined, { class: `kvqx-${name}` });
    piece.style.width = percent(bytes / whole, 3);
    return piece;
  }));
  bar.setAttribute("aria-label", words);
}

function kvqExplorer(root, data) {
  const shown = (name) => root.querySelector(`[data-show="${name}"]`);
  const fields = (name) => [...root.querySelectorAll(`[data-field="${name}"]`)];
  const field = (name) => fields(name)[0];
  const page = data.page_size;
  const fp16 = data.schemes.find((s) => s.name === "fp16");
  const describe = (h) => `layer ${h.layer}, head ${h.head}`;
  const cached = new Map(); // what has been computed for a head, a scheme and a window

  function fill(name, options) {
    for (const select of fields(name))
      select.replaceChildren(...options.map((text, i) => element("option", text, { value: i })));
  }

  // What the controls say. A number that makes no sense leaves the last good one.
  let batch = Number(field("batch").value);
  function setting() {
    const input = field("batch");
    const typed = Number(input.value);
    const good = input.value.trim() !== "" && Number.isInteger(typed)
      && typed >= Number(input.min) && typed <= Number(input.max);
    if (good) batch = typed;
    input.setAttribute("aria-invalid", String(!good));
    return {
      scheme: data.schemes[field("scheme").value],
      recent: Number(field("recent").value),
      model: data.models[field("model").value],
      context: Math.round(2 ** (Number(field("context").value) / 4)),
      batch,
      gpu: data.gpus[field("gpu").value],
      weights: Number(field("weights").value),
      head: data.heads[field("head").value],
      token: Number(field("token").value),
    };
  }

  function numbers(head, scheme, recent) {
    const key = [describe(head), scheme.name, recent].join();
    if (!cached.has(key)) {
      const before = halves(head.keys);
      const after = coldKeys(head, scheme, page);
      const patterns = [before, after].map((k) => attention(head, k, recent, page));
      const square = (x) => x.reduce((sum, v) => sum + v * v, 0);
      const error = Math.sqrt(square(after.map((v, i) => v - before[i])) / square(before));
      cached.set(key, { before, after, patterns, error, moved: movedShares(...patterns) });
    }
    return cached.get(key);
  }

  function showMemory(s) {
    const bytes = cacheBytes(data, s);
    const one = cacheBytes(data, { ...s, batch: 1 });
    const wide = cacheBytes(data, { ...s, scheme: fp16, recent: 0 });
    const weights = weightBytes(s.model, s.weights);
    const room = s.gpu.usable - weights;
    const most = mostSequences(s.gpu.usable, weights, one.total);
    const added = bytes.scales + bytes.zeros;
    const parts = [["codes", bytes.codes], ["scales", added], ["hot", bytes.hot]];
    const ratio = wide.total / bytes.total;
    const size = `${inBytes(bytes.total)} (${inBytes(wide.total)} in FP16)`;
    const fits = batch <= most ? `and so these ${batch} do` : `so these ${batch} do not`;
    const ending = room < 0
      ? `The weights alone, ${inBytes(weights)}, do not fit the ${s.gpu.name}.`
      : `Beside the weights the ${s.gpu.name} has room for ${inBytes(room)}: `
        + `${sequences(most)} ${most === 1 ? "fits" : "fit"}, ${fits}.`;
    shown("context").textContent = `${count(s.context)} tokens`;
    field("context").setAttribute("aria-valuetext", `${count(s.context)} tokens`);
    shown("summary").textContent =
      `${s.scheme.name.toUpperCase()}, ${s.model.name}, ${sequences(s.batch)} of `
      + `${count(s.context)} tokens: the cache takes ${size}, a factor of `
      + `${ratio.toFixed(2)}. ${ending}`;
    fillBar(shown("cache-bar"), parts, Math.max(wide.total, bytes.total),
      `The cache takes ${percent(bytes.total / wide.total)} of what FP16 takes.`);
    shown("gpu-name").textContent =
      `The ${s.gpu.name}, of whose memory ${inBytes(s.gpu.usable)} are used`;
    const used = weights + bytes.total;
    const all = [["weights", weights], ...parts, ["free", s.gpu.usable - used]];
    fillBar(shown("gpu-bar"), all, Math.max(s.gpu.usable, used),
      `Weights and cache take ${percent(used / s.gpu.usable)} of the usable memory.`);
    const elements = 2 * s.model.layers * s.model.kv_heads * s.model.head_dim * s.context;
    fillRows(shown("bytes"), [
      ["codes", "codes"], ["scales", "scales"], ["zero points", "zeros"],
      ["hot pages", "hot"], ["together", "total"],
    ].map(([head, part]) => [
      head,
      [inBytes(one[part]), one[part]],
      [inBytes(bytes[part]), bytes[part]],
      ((8 * one[part]) / elements).toFixed(3),
    ]), 4);
    const least = (1000 * used) / s.gpu.bandwidth;
    shown("time").textContent =
      `A step of decoding reads weights and cache once. At ${s.gpu.bandwidth / 1e9} GB/s `
      + `that takes at least ${least.toFixed(1)} ms; a bound, not a measurement.`;
    shown("time").dataset.exact = least;
    shown("summary").dataset.most = most;
  }

  function showDamage(s) {
    const plot = shown("plot");
    const x = (bits) => 44 + ((bits - 2) / 16) * 300;
    const y = (kl) => 180 - ((Math.log10(kl) + 7) / 7) * 165;
    const svg = (name, attributes, text) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      if (text !== undefined) made.textContent = text;
      return made;
    };
    const lines = [svg("path", { d: "M44 10 V180 H344" })];
    for (const bits of [2, 4, 6, 8, 12, 16]) {
      lines.push(svg("path", { d: `M${x(bits)} 180 v4` }));
      lines.push(svg("text", { x: x(bits), y: 196, "text-anchor": "middle" }, bits));
    }
    for (const power of [-6, -4, -2, 0]) {
      lines.push(svg("path", { d: `M44 ${y(10 ** power)} h-4` }));
      lines.push(svg("text", { x: 37, y: y(10 ** power) + 4, "text-anchor": "end" },
        { 0: "1", "-2": "0.01", "-4": "10⁻⁴", "-6": "10⁻⁶" }[power]));
    }
    lines.push(svg("text", { x: 194, y: 212, "text-anchor": "middle" }, "bits a number"));
    lines.push(svg("text", { x: 50, y: 14 }, "KL divergence (nats)"));
    for (const scheme of data.schemes) {
      const { bits, kl } = scheme.measured;
      // A name goes to the left of its point where the right has no room for it.
      const left = x(bits) > 300 || data.schemes.some(({ measured: m }) =>
        m.bits > bits && x(m.bits) - x(bits) < 60 && Math.abs(y(m.kl) - y(kl)) < 8);
      const point = svg("g", { class: scheme === s.scheme ? "kvqx-chosen" : "" });
      point.append(svg("circle", { cx: x(bits), cy: y(kl), r: 5 }));
      point.append(svg("text", {
        x: x(bits) + (left ? -9 : 9), y: y(kl) + 4, "text-anchor": left ? "end" : "start",
      }, scheme.name));
      lines.push(point);
    }
    plot.replaceChildren(...lines);
    const m = s.scheme.measured;
    plot.setAttribute("aria-label", `KL divergence against bits for each scheme. `
      + `${s.scheme.name}: ${m.bits} bits, ${m.kl.toPrecision(2)} nats.`);
    fillRows(shown("damage"), data.schemes.map((d) => [
      d.name, d.measured.bits, d.measured.kl.toPrecision(2),
      (d.measured.delta < 0 ? "" : "+") + d.measured.delta.toFixed(3),
    ]), data.schemes.indexOf(s.scheme));
  }

  function showKeys(s) {
    const { before, after, error, moved } = numbers(s.head, s.scheme, s.recent);
    const { dim } = s.head;
    const tokens = before.length / dim;
    const largest = before.reduce((most, v) => Math.max(most, Math.abs(v)), 0);
    const signed = (v) => 0.5 + 0.5 * Math.sign(v) * Math.sqrt(Math.abs(v) / largest);
    const at = (keys) => (x, y) => signed(keys[x * dim + y]);
    paint(shown("keys-before"), tokens, dim, at(before));
    paint(shown("keys-after"), tokens, dim, at(after));
    paint(shown("keys-error"), tokens, dim, (x, y) =>
      Math.sqrt(Math.abs(after[x * dim + y] - before[x * dim + y]) / largest));
    const words = `${percent(error)} of the size of the keys`;
    shown("keys-summary").textContent =
      `${s.scheme.name.toUpperCase()}, ${describe(s.head)}: the error is ${words}, and `
      + `${percent(mean(moved))} of the attention lies on other tokens than before.`;
    shown("keys-summary").dataset.error = error;
    shown("keys-summary").dataset.moved = mean(moved);
    shown("keys-before").setAttribute("aria-label",
      `Keys of ${tokens} tokens, ${dim} channels each; some channels are large for all tokens.`);
    shown("keys-after").setAttribute("aria-label", `The same keys, read back from ${s.scheme.name}.`);
    shown("keys-error").setAttribute("aria-label", `Their error: ${words}.`);
    shown("keys-scale").textContent =
      `Tokens 0 to ${tokens - 1} from left to right, in pages of ${page}; channels 0 to `
      + `${dim - 1} from top to bottom. Dark is ${(-largest).toFixed(1)}, bright is `
      + `${largest.toFixed(1)}; errors go from 0, dark, to ${largest.toFixed(1)}. `
      + "Colours follow square roots, so that small numbers show.";
    fillRows(shown("head-table"), data.schemes.map((scheme) => {
      const found = numbers(s.head, scheme, s.recent);
      return [
        scheme.name,
        count(storedBytes(s.head, scheme)),
        [percent(found.error, 2), found.error],
        [percent(mean(found.moved), 2), mean(found.moved)],
      ];
    }), data.schemes.indexOf(s.scheme));
  }

  function showText(paragraph, row, asks) {
    paragraph.replaceChildren(...data.tokens.map((text, i) => {
      const p = row[i] ?? 0;
      const piece = element("span", text, { "data-token": i });
      if (i === asks) piece.className = "kvqx-asks";
      if (i > asks) piece.className = "kvqx-later";
      if (p > 0.004) {
        piece.style.backgroundColor = `rgba(var(--mark), ${0.85 * Math.sqrt(p)})`;
        piece.style.borderBottomWidth = `${Math.round(5 * Math.sqrt(p))}px`;
      }
      return piece;
    }));
  }

  function showAttention(s) {
    const { patterns, moved } = numbers(s.head, s.scheme, s.recent);
    const [before, after] = patterns;
    const asks = s.token;
    const name = data.tokens[asks].trim();
    shown("token").textContent = `“${name}”, number ${asks}`;
    field("token").setAttribute("aria-valuetext", `${name}, number ${asks}`);
    showText(shown("text-before"), before[asks], asks);
    showText(shown("text-after"), after[asks], asks);
    shown("after-name").textContent = `With keys in ${s.scheme.name.toUpperCase()}`;
    const best = (row) => row.indexOf(Math.max(...row));
    const [was, is] = [best(before[asks]), best(after[asks])];
    const same = was === is ? "and still does" : `now at “${data.tokens[is].trim()}” (${is})`;
    shown("attention-summary").textContent =
      `In 16 bits “${name}” (${asks}) looks most at “${data.tokens[was].trim()}” (${was}), `
      + `${same}; ${percent(moved[asks])} of its attention has moved.`;
    const order = [...before[asks].keys()].sort(
      (a, b) => Math.max(before[asks][b], after[asks][b]) - Math.max(before[asks][a], after[asks][a]));
    fillRows(shown("top-table"), order.slice(0, 6).map((i) => [
      data.tokens[i].trim(), i,
      [percent(before[asks][i]), before[asks][i]], [percent(after[asks][i]), after[asks][i]],
    ]));
    const size = before.length;
    const at = (rows) => (x, y) => Math.sqrt(rows[y][x] ?? 0);
    paint(shown("attention-before"), size, size, at(before));
    paint(shown("attention-after"), size, size, at(after));
    paint(shown("attention-error"), size, size, (x, y) =>
      x > y ? 0 : Math.sqrt(Math.abs(after[y][x] - before[y][x])));
    shown("attention-before").setAttribute("aria-label",
      `Attention of ${size} tokens to the tokens before them, keys in 16 bits.`);
    shown("attention-after").setAttribute("aria-label", `The same with keys in ${s.scheme.name}.`);
    shown("attention-error").setAttribute("aria-label",
      `The change: ${percent(mean(moved))} of the attention, on average.`);
  }

  function show() {
    const s = setting();
    showMemory(s);
    showDamage(s);
    showKeys(s);
    showAttention(s);
  }

  fill("scheme", data.schemes.map((s) => s.label));
  fill("model", data.models.map((m) => m.name));
  fill("gpu", data.gpus.map((g) => g.name));
  fill("head", data.heads.map(describe));
  const first = (list, name) => list.findIndex((entry) => entry.name === name);
  for (const select of fields("scheme")) select.value = first(data.schemes, "int4");
  field("model").value = first(data.models, "Llama-3.1-8B");
  field("gpu").value = first(data.gpus, "L4");
  field("token").max = data.tokens.length - 1;
  field("token").value = data.tokens.length - 2;
  // Only the sentence beside the control that was moved is read out.
  function readOut(control) {
    for (const status of root.querySelectorAll("[role=status]")) {
      const beside = status.closest("section") === control.closest("section");
      status.setAttribute("aria-live", beside ? "polite" : "off");
    }
  }
  root.addEventListener("input", (event) => {
    readOut(event.target);
    if (event.target.dataset.field === "scheme")
      for (const select of fields("scheme")) select.value = event.target.value;
    show();
  });
  root.addEventListener("click", (event) => {
    const token = event.target.dataset.token;
    if (token === undefined) return;
    field("token").value = token;
    show();
  });
  root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  root.kvq = { data, cacheBytes, weightBytes, mostSequences, coldKeys, attention };
  show();
}

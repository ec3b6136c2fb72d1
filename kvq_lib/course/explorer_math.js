// What the explorer computes: the library's formulas once more. tests/test_explorer.py
// compares them with the library.

// -- bytes ---------------------------------------------------------------------------

// Bytes of one page of keys, or of values, of one kv head.
function sideBytes(side, page, dim) {
  const groups = { page: 1, token: page, channel: dim }[side.scales] || 0;
  return {
    codes: (page * dim * side.bits) / 8,
    scales: 2 * groups,
    zeros: side.zeros ? 2 * groups : 0,
  };
}

// Pages of a sequence that are sealed, and pages that are kept in 16 bits.
function pagesOf(context, recent, page) {
  const full = Math.floor(context / page);
  const window = Math.ceil(recent / page);
  const hot = Math.min(full + 1, Math.ceil(context / page)) - Math.max(0, full - window);
  return { sealed: full, hot: Math.max(0, hot) };
}

// Bytes of a cache by what they hold: `kvq.kv_bytes`, taken apart.
function cacheBytes(data, s) {
  const { layers, kv_heads: heads, head_dim: dim } = s.model;
  const page = data.page_size;
  const { sealed, hot } = pagesOf(s.context, s.recent, page);
  const many = layers * heads * s.batch;
  const sides = [s.scheme.keys, s.scheme.values].map((x) => sideBytes(x, page, dim));
  const bytes = { hot: many * hot * 2 * page * dim * data.hot_bytes };
  for (const part of ["codes", "scales", "zeros"])
    bytes[part] = many * sealed * (sides[0][part] + sides[1][part]);
  bytes.total = bytes.codes + bytes.scales + bytes.zeros + bytes.hot;
  return bytes;
}

// Bytes of all weights.
function weightBytes(model, bits) {
  return Math.ceil((model.parameters * bits) / 8);
}

// Sequences that fit beside the weights: `kvq.max_batch`.
function mostSequences(usable, weights, perSequence) {
  return Math.max(0, Math.floor((usable - weights) / perSequence));
}

// -- numbers of a head ---------------------------------------------------------------

function bytesOf(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

// A float16 from its bits.
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const rest = bits & 1023;
  if (exponent === 0) return sign * rest * 2 ** -24;
  return sign * (1 + rest / 1024) * 2 ** (exponent - 15);
}

function halves(text) {
  const bytes = bytesOf(text);
  return Float32Array.from({ length: bytes.length / 2 }, (_, i) =>
    half(bytes[2 * i] | (bytes[2 * i + 1] << 8)));
}

// An FP8 number (e4m3) from its bits.
function e4m3(bits) {
  return half(((bits & 0x80) << 8) | ((bits & 0x7f) << 7)) * 256;
}

// The code of channel d in a row of packed codes: a byte holds channels that are a
// fraction of the row apart, low bits first.
function codeAt(row, d, side, dim) {
  if (side.format === "fp8") return e4m3(row[d]);
  const bytes = (dim * side.bits) / 8;
  const shift = Math.floor(d / bytes) * side.bits;
  return ((row[d % bytes] >> shift) & ((1 << side.bits) - 1)) - side.offset;
}

// The keys that attention reads cold, [tokens * dim]: codes · scale + zero, in float32.
function coldKeys(head, scheme, page) {
  const keys = halves(head.keys);
  const stored = head.sealed[scheme.name];
  if (!stored) return keys;
  const side = scheme.keys;
  const dim = head.dim;
  const codes = bytesOf(stored.codes);
  const scales = halves(stored.scales);
  const zeros = stored.zeros && halves(stored.zeros);
  const width = (dim * side.bits) / 8;
  for (let token = 0; token < codes.length / width; token++) {
    const row = codes.subarray(token * width, (token + 1) * width);
    const inPage = Math.floor(token / page);
    for (let d = 0; d < dim; d++) {
      const group = { page: inPage, token, channel: inPage * dim + d }[side.scales];
      const x = Math.fround(codeAt(row, d, side, dim) * scales[group]);
      keys[token * dim + d] = zeros ? x + zeros[group] : x;
    }
  }
  return keys;
}

// Attention probabilities, rows of growing length: row i is what query i reads. A query
// reads its own page and the `recent` tokens before it in 16 bits.
function attention(head, cold, recent, page) {
  const dim = head.dim;
  const hot = halves(head.keys);
  const queries = halves(head.queries);
  const window = Math.ceil(recent / page);
  const rows = [];
  for (let i = 0; i * dim < hot.length; i++) {
    const oldest = (Math.floor(i / page) - window) * page;
    const scores = Float64Array.from({ length: i + 1 }, (_, j) => {
      const keys = j >= oldest ? hot : cold;
      let sum = 0;
      for (let d = 0; d < dim; d++) sum += queries[i * dim + d] * keys[j * dim + d];
      return sum / Math.sqrt(dim);
    });
    const top = scores.reduce((a, b) => Math.max(a, b));
    const weights = scores.map((x) => Math.exp(x - top));
    const total = weights.reduce((a, b) => a + b, 0);
    rows.push(weights.map((w) => w / total));
  }
  return rows;
}

// The share of attention that lies on other tokens than before, for each query.
function movedShares(before, after) {
  return before.map((row, i) =>
    row.reduce((sum, p, j) => sum + Math.abs(p - after[i][j]), 0) / 2);
}

function mean(numbers) {
  return numbers.reduce((a, b) => a + b, 0) / numbers.length;
}

// Bytes of a head's sealed keys; FP16 keeps two a number.
function storedBytes(head, scheme) {
  const stored = head.sealed[scheme.name];
  if (!stored) return bytesOf(head.keys).length;
  return [stored.codes, stored.scales, stored.zeros]
    .filter(Boolean)
    .reduce((sum, text) => sum + bytesOf(text).length, 0);
}

// One rule of marking for every face: marking.py once more. Tests compare the two.

const KVQ_SLACK = 1e-9;

const KVQ_NUMBER = new RegExp(
  "^(?<sign>[-+−]?)\\s*"
  + "(?<whole>\\d{1,3}(?:[,_' \\u00a0\\u2009\\u202f]\\d{3})+(?!\\d)|\\d+)?"
  + "(?<part>\\.\\d+|\\.)?"
  + "(?:[eE](?<e>[-+−]?\\d+)|\\s*[×x*·]\\s*10\\s*\\^?\\s*(?<ten>[-+−]?\\d+))?"
  + "(?<over>\\s*\\/\\s*\\d+(?:\\.\\d+)?)?");
const KVQ_AROUND = /^\s*(?:[~≈=]|about\b|approx\.?)?\s*|\s+$/gi;
const KVQ_UNIT = /^(?:\p{L}|[%/·²³\u2070-\u209f .^()-])*$/u;
// Units that are converted if the answer is asked for in another one of the row.
const KVQ_UNITS = [
  {
    b: 1, byte: 1, bytes: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12,
    kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40,
  },
  { s: 1, ms: 1e-3, µs: 1e-6, us: 1e-6 },
];

// The number that somebody typed, in a unit, or null.
function kvqReadNumber(typed, unit = "") {
  if (typed.length > 60) return null;
  const text = typed.trim().replace(KVQ_AROUND, "");
  const found = KVQ_NUMBER.exec(text);
  const { sign, whole, part, e, ten, over } = found.groups;
  if (!whole && (part ?? ".") === ".") return null;
  const behind = text.slice(found[0].length).trim();
  if (!KVQ_UNIT.test(behind)) return null;
  const digits = (whole ?? "0").replace(/[^0-9]/g, "") + (part ?? "");
  const power = (e ?? ten ?? "0").replace("−", "-");
  if (Math.abs(Number(power)) > 300 || digits.length > 40) return null;
  let value = Number(`${digits}e${power}`) * (sign === "-" || sign === "−" ? -1 : 1);
  if (over) {
    const below = Number(over.trim().replace("/", "").trim());
    if (below === 0) return null;
    value /= below;
  }
  for (const row of KVQ_UNITS) {
    const known = [behind, unit].map((u) => u.toLowerCase());
    if (known.every((u) => Object.hasOwn(row, u))) value *= row[known[0]] / row[known[1]];
  }
  return Number.isFinite(value) ? value : null;
}

function kvqNear(given, wanted, tolerance) {
  return Math.abs(given - wanted) <= (tolerance + KVQ_SLACK) * Math.abs(wanted);
}

// The known mistake that a wrong number comes from, or null.
function kvqMistake(question, given) {
  return question.mistakes.find((m) => kvqNear(given, m.value, question.tolerance)) ?? null;
}

// The points of an answer, 0 to 1: places of choices or of the rubric's lines, or what was typed.
function kvqMark(question, answer) {
  if (question.kind === "numeric") {
    const given = kvqReadNumber(answer ?? "", question.unit);
    return given !== null && kvqNear(given, question.answer, question.tolerance) ? 1 : 0;
  }
  const chosen = new Set(answer ?? []);
  if (question.kind === "open")
    return question.rubric.reduce((sum, l, i) => sum + (chosen.has(i) ? l.points : 0), 0)
      / question.rubric.reduce((sum, l) => sum + l.points, 0);
  const rights = question.choices.flatMap((choice, i) => (choice.right ? [i] : []));
  const hits = rights.filter((i) => chosen.has(i)).length;
  const wrong = chosen.size - hits;
  if (question.kind === "single") return hits === rights.length && wrong === 0 ? 1 : 0;
  return Math.max(0, (hits - wrong) / rights.length);
}

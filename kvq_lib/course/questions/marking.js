// One rule of marking for every face: numbers.py and marking.py once more, with the
// table of units of numbers.py before it. Tests compare the two.

const KVQ_SLACK = 1e-9;

const KVQ_LONGEST = 60;
const KVQ_SPACE = "[ \\t\\n\\r\\f\\v\\u00a0\\u2009\\u202f]";
const KVQ_NUMBER = new RegExp((
  "^(?<sign>[-+−]?)SPACE*"
  + "(?<whole>[1-9][0-9]{0,2}(?<mark>[,_' \\u00a0\\u2009\\u202f])[0-9]{3}"
  + "(?:\\k<mark>[0-9]{3})*(?![0-9])|[0-9]+)?"
  + "(?<part>\\.[0-9]+|\\.)?"
  + "(?:[eE](?<e>[-+−]?[0-9]+)"
  + "|SPACE*[×x*·]SPACE*10SPACE*\\^?SPACE*(?<ten>[-+−]?[0-9]+))?"
  + "(?<over>SPACE*/SPACE*[0-9]+(?:\\.[0-9]+)?)?").replaceAll("SPACE", KVQ_SPACE));
const KVQ_ENDS = new RegExp(`^${KVQ_SPACE}+|${KVQ_SPACE}+$`, "g");
const KVQ_AROUND = new RegExp(`^(?:[~≈=]|[Aa]bout|[Aa]pprox\\.?)?${KVQ_SPACE}*`);
const KVQ_SPACES = new RegExp(`${KVQ_SPACE}+`, "g");
const KVQ_EACH_SECOND = /\/(?:s|sec|second)$| (?:per|a) second$/;
const KVQ_EACH_NUMBER = /(?:\/| per | a | an )(?:number|element|value)$/;

// How a question for a number goes on: ", in MiB", ", the number of tokens" or nothing.
function kvqAskedIn(unit) {
  const measured = unit.includes("/") || KVQ_TABLE.units.some((row) => Object.hasOwn(row, unit));
  if (unit === "%") return ", in percent";
  return unit && (measured ? `, in ${unit}` : `, the number of ${unit}`);
}

// The number that somebody typed, in a unit, or null.
function kvqReadNumber(typed, unit = "") {
  const found = kvqRead(typed, unit);
  return typeof found === "number" ? found : null;
}

// Why a text is refused as a number; "" if it is not.
function kvqWhyNot(typed, unit = "") {
  const found = kvqRead(typed, unit);
  return typeof found === "string" ? found : "";
}

// A number, or the reason why there is none.
function kvqRead(typed, unit) {
  const { reasons } = KVQ_TABLE;
  if (typed.length > KVQ_LONGEST) return reasons.long;
  const text = typed.replace(KVQ_ENDS, "").replace(KVQ_AROUND, "");
  const found = KVQ_NUMBER.exec(text);
  const { sign, whole, part, e, ten, over } = found.groups;
  if (!whole && (part ?? ".") === ".") return reasons.none;
  const behind = text.slice(found[0].length);
  if (/^,[0-9]/.test(behind)) return reasons.comma;
  const digits = (whole ?? "0").replace(/[^0-9]/g, "") + (part ?? "");
  const power = (e ?? ten ?? "0").replace("−", "-");
  if (Math.abs(Number(power)) > 300 || digits.length > 40) return reasons.large;
  let value = Number(`${digits}e${power}`) * (sign === "-" || sign === "−" ? -1 : 1);
  if (over) {
    const below = Number(over.replace("/", "").replace(KVQ_SPACES, ""));
    if (below === 0) return reasons.zero;
    value /= below;
  }
  const size = kvqSize(behind.replace(KVQ_SPACES, " ").replace(/^ | $/g, ""), unit);
  if (typeof size === "string") return /[0-9]/.test(behind) ? reasons.none : size;
  value *= size;
  return Number.isFinite(value) ? value : reasons.large;
}

// What one of the unit behind a number is in the unit asked for, or a reason.
function kvqSize(typed, unit) {
  const { units, counts, percent, reasons } = KVQ_TABLE;
  if (typed === "" || typed === unit) return 1;
  if (percent.includes(typed.toLowerCase()) && (unit === "" || unit === "%"))
    return unit === "" ? 0.01 : 1;
  const behind = unit === "bits" ? typed.replace(KVQ_EACH_NUMBER, "") : typed;
  const rate = KVQ_EACH_SECOND.test(behind) && KVQ_EACH_SECOND.test(unit);
  const [given, asked] = [behind, unit].map((u) => (rate ? u.replace(KVQ_EACH_SECOND, "") : u));
  for (const row of units) {
    // Symbols as they are, words in any case: mb and MB are not the same.
    const name = Object.hasOwn(row, given) || given.length < 4 ? given : given.toLowerCase();
    if (Object.hasOwn(row, name) && Object.hasOwn(row, asked)) return row[name] / row[asked];
  }
  if (/^[kKmMgGtT]?i?b(?:\/s)?$/.test(behind)) return reasons.bits;
  if (/^[kKMGT](?: |$)/.test(behind)) return reasons.factor;
  const one = (word) => word.toLowerCase().replace(/s$/, "");
  let words = asked === "" ? counts : [asked, asked.split(" ").at(-1)];
  if (asked === "times") words = counts.slice(0, 5);
  if (words.map(one).includes(one(given))) return 1;
  return unit ? `${reasons.unit}${unit}.` : reasons.pure;
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

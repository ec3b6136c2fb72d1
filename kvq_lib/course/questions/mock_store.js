// What the browser keeps for the mock interview, and how several tabs share it.
//
// Nothing that comes from outside is trusted: another tab, an older page, a file or a
// reader with a console may have written it.

const KVQ_KEY = "kvq-mock-interview";
const KVQ_EXPORT = "kvq-progress";
const KVQ_VERSION = 1;
const KVQ_MOST = { entries: 5000, questions: 1000, text: 100_000, file: 5_000_000 };
const KVQ_SESSIONS = 5; // so many interviews are kept with their answers

const kvqIsObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
const kvqIsName = (x) => typeof x === "string" && x.length > 0 && x.length < 60;
const kvqIsTime = (x) => Number.isFinite(x) && x >= 0 && x < 4e12; // up to the year 2096
// Different whole numbers below a bound.
const kvqArePlaces = (x, below) => Array.isArray(x) && new Set(x).size === x.length
  && x.every((i) => Number.isInteger(i) && i >= 0 && i < below);

function kvqGoodRow(row) {
  return Array.isArray(row) && row.length === 2 && row.every(Number.isFinite)
    && Number.isInteger(row[0]) && row[0] > 0 && row[0] <= KVQ_MOST.questions
    && row[1] >= 0 && row[1] <= row[0] + 1e-9;
}

// An interview of the past: its topics add up to the whole.
function kvqGoodEntry(entry) {
  if (!kvqIsObject(entry) || !kvqIsName(entry.id) || typeof entry.when !== "string"
    || !/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$/.test(entry.when)
    || !kvqIsTime(Date.parse(entry.when))
    || !kvqGoodRow(entry.all) || !kvqIsObject(entry.topics)) return false;
  const rows = Object.entries(entry.topics);
  return rows.length <= 100 && rows.every(([name, row]) => kvqIsName(name) && kvqGoodRow(row))
    && [0, 1].every((i) =>
      Math.abs(rows.reduce((sum, [, row]) => sum + row[i], 0) - entry.all[i]) < 1e-6);
}

function kvqGoodItem(question, item) {
  if (!question || !kvqIsObject(item)) return false;
  const count = question.choices?.length ?? 0;
  const most = question.kind === "single" ? 1 : count;
  const answered = item.answer === null || (question.choices
    ? kvqArePlaces(item.answer, count) && item.answer.length <= most
    : typeof item.answer === "string" && item.answer.length <= KVQ_MOST.text);
  return answered && kvqArePlaces(item.order, count) && item.order.length === count
    && kvqArePlaces(item.met, question.rubric?.length ?? 0);
}

// A session that the page can show or go on with.
function kvqGoodSession(bank, session) {
  const find = new Map(bank.questions.map((q) => [q.id, q]));
  return kvqIsObject(session) && kvqIsName(session.id) && kvqIsTime(session.started)
    && [session.deadline, session.finished].every((t) => t === null || kvqIsTime(t))
    && Array.isArray(session.items) && Number.isInteger(session.at)
    && session.at >= 0 && session.at < session.items.length
    && session.items.every((item) => kvqGoodItem(find.get(item?.id), item))
    && new Set(session.items.map((item) => item.id)).size === session.items.length;
}

// What was kept, and what of it had to go: "damaged", "changed" (other questions) or "".
function kvqOfText(bank, text) {
  const empty = { sessions: [], history: [] };
  if (text === null) return { kept: empty, lost: "" };
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    return { kept: empty, lost: "damaged" };
  }
  if (!kvqIsObject(found) || !Array.isArray(found.sessions) || !Array.isArray(found.history))
    return { kept: empty, lost: "damaged" };
  const history = kvqMerged([], found.history.filter(kvqGoodEntry));
  const ours = found.sessions.filter((s) => s?.bank === bank.fingerprint);
  const sessions = ours.filter((s) => kvqGoodSession(bank, s));
  const damaged = history.length < found.history.length || sessions.length < ours.length
    || found.sessions.some((s) => typeof s?.bank !== "string");
  const changed = found.sessions.some((s) => s?.finished === null && !ours.includes(s));
  return { kept: { sessions, history }, lost: damaged ? "damaged" : changed ? "changed" : "" };
}

// The entries of an exported file; throws what a reader can understand.
function kvqImported(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (found?.kind !== KVQ_EXPORT || !Array.isArray(found.history))
    throw new Error("This file holds no progress of this page.");
  if (found.version !== KVQ_VERSION)
    throw new Error("This file is of another version of this page; nothing was imported.");
  if (found.history.length > KVQ_MOST.entries || !found.history.every(kvqGoodEntry))
    throw new Error("This file is damaged; nothing was imported.");
  return found.history;
}

// Two lists of entries as one, oldest first; of two with one id the second counts.
function kvqMerged(one, other) {
  const entries = new Map([...one, ...other].map((entry) => [entry.id, entry]));
  return [...entries.values()].sort((a, b) => Date.parse(a.when) - Date.parse(b.when));
}

// How many entries are new, and how many have changed.
function kvqCompared(before, after) {
  const known = new Map(before.map((entry) => [entry.id, JSON.stringify(entry)]));
  const fresh = after.filter((entry) => !known.has(entry.id)).length;
  const same = after.filter((entry) => known.get(entry.id) === JSON.stringify(entry)).length;
  return { fresh, other: after.length - fresh - same };
}

// The store. Every change is made to what the browser keeps at that moment, never to a
// copy: another tab may have written since. Where the browser keeps nothing, the page
// does, until it is left.
function kvqStore(bank) {
  let own = null; // the text, where the browser takes none
  const store = {
    kept: true,
    lost: "",
    read() {
      let text = own;
      try {
        if (this.kept) text = window.localStorage.getItem(KVQ_KEY);
      } catch {
        this.kept = false;
      }
      const { kept, lost } = kvqOfText(bank, text);
      this.lost = lost;
      return kept;
    },
    // `how` alters the state; it returns false to leave everything as it is.
    change(how) {
      const state = this.read();
      if (how(state) === false) return state;
      state.sessions = state.sessions.sort((a, b) => b.started - a.started)
        .slice(0, KVQ_SESSIONS);
      own = JSON.stringify(state);
      try {
        window.localStorage.setItem(KVQ_KEY, own);
        this.kept = true;
      } catch {
        this.kept = false;
      }
      return state;
    },
  };
  try {
    window.localStorage.setItem(`${KVQ_KEY}-try`, "");
    window.localStorage.removeItem(`${KVQ_KEY}-try`);
  } catch {
    store.kept = false;
    try { // full, but what is there can be read
      own = window.localStorage.getItem(KVQ_KEY);
    } catch {
      own = null;
    }
  }
  return store;
}

// Which interview a tab shows, also after a reload.
const kvqTab = {
  get() {
    try {
      return window.sessionStorage.getItem(KVQ_KEY);
    } catch {
      return null;
    }
  },
  set(id) {
    try {
      window.sessionStorage.setItem(KVQ_KEY, id ?? "");
    } catch {
      // Then the newest interview is shown after a reload.
    }
  },
};

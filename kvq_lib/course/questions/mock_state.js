// The mock interview without its page: who is asked what, what it is worth, what is kept.

const KVQ_KEY = "kvq-mock-interview";
const KVQ_EXPORT = "kvq-progress";

function kvqShuffled(list) {
  const made = [...list];
  for (let i = made.length - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [made[i], made[j]] = [made[j], made[i]];
  }
  return made;
}

// The questions that a choice of topics, levels and kinds leaves.
function kvqFitting(bank, wish) {
  return bank.questions.filter((q) =>
    wish.topics.includes(q.topic) && wish.levels.includes(q.level)
    && wish.kinds.includes(q.kind));
}

// A new interview: questions and choices in an order of its own.
function kvqSession(bank, wish, now) {
  const questions = kvqShuffled(kvqFitting(bank, wish)).slice(0, wish.number);
  return {
    id: `${now}-${Math.floor(Math.random() * 1e9)}`,
    bank: bank.fingerprint,
    started: now,
    deadline: wish.minutes ? now + 60_000 * wish.minutes : null,
    finished: null,
    at: 0,
    items: questions.map((q) => ({
      id: q.id,
      order: kvqShuffled((q.choices ?? []).map((_, i) => i)),
      answer: null,
      met: [],
    })),
  };
}

function kvqAnswered(item) {
  return typeof item.answer === "string" ? item.answer.trim() !== ""
    : (item.answer ?? []).length > 0;
}

// The points of an item; open answers are worth what their author says.
function kvqPoints(question, item) {
  return kvqMark(question, question.kind === "open" ? item.met : item.answer);
}

// Questions and points, by topic and together.
function kvqScore(bank, session) {
  const find = new Map(bank.questions.map((q) => [q.id, q]));
  const topics = {};
  const all = [0, 0];
  for (const item of session.items) {
    const question = find.get(item.id);
    const row = (topics[question.topic] ??= [0, 0]);
    [1, kvqPoints(question, item)].forEach((n, i) => { row[i] += n; all[i] += n; });
  }
  return { topics, all };
}

// What stays of a finished interview.
function kvqEntry(bank, session) {
  const { topics, all } = kvqScore(bank, session);
  return { id: session.id, when: new Date(session.finished).toISOString(), all, topics };
}

function kvqGoodRow(row) {
  return Array.isArray(row) && row.length === 2 && row[0] > 0
    && row.every((n) => Number.isFinite(n) && n >= 0) && row[1] <= row[0] + 1e-9;
}

function kvqGoodEntry(entry) {
  return typeof entry?.id === "string" && entry.id.length < 60
    && typeof entry.when === "string" && !Number.isNaN(Date.parse(entry.when))
    && kvqGoodRow(entry.all) && typeof entry.topics === "object" && entry.topics !== null
    && Object.values(entry.topics).every(kvqGoodRow);
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
  if (!found.history.every(kvqGoodEntry)) throw new Error("This file is damaged.");
  return found.history;
}

// Two lists of entries as one, oldest first; of two with one id the second counts.
function kvqMerged(one, other) {
  const entries = new Map([...one, ...other].map((entry) => [entry.id, entry]));
  return [...entries.values()].sort((a, b) => Date.parse(a.when) - Date.parse(b.when));
}

// A session that the page can go on with: made of questions that there are.
function kvqGoodSession(bank, session) {
  const find = new Map(bank.questions.map((q) => [q.id, q]));
  return session?.bank === bank.fingerprint && Array.isArray(session.items)
    && session.at in session.items && session.items.every((item) =>
      find.has(item.id) && Array.isArray(item.order) && Array.isArray(item.met));
}

// What the browser keeps. Where it keeps nothing, the page does, until it is left.
function kvqStore() {
  const empty = { session: null, history: [] };
  return {
    kept: true,
    read() {
      try {
        const found = JSON.parse(window.localStorage.getItem(KVQ_KEY)) ?? {};
        const history = (found.history ?? []).filter(kvqGoodEntry);
        return { ...empty, session: found.session ?? null, history };
      } catch {
        return empty;
      }
    },
    write(state) {
      try {
        window.localStorage.setItem(KVQ_KEY, JSON.stringify(state));
        this.kept = true;
      } catch {
        this.kept = false;
      }
    },
  };
}

function kvqClock(milliseconds) {
  const seconds = Math.max(0, Math.ceil(milliseconds / 1000));
  return `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
}

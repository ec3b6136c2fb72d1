// The mock interview without its page: who is asked what, and what it is worth.

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

// A number that nobody can read is no answer.
function kvqAnswered(question, item) {
  if (question.kind === "numeric")
    return kvqReadNumber(item.answer ?? "", question.unit) !== null;
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

function kvqClock(milliseconds) {
  const seconds = Math.max(0, Math.ceil(milliseconds / 1000));
  return `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
}

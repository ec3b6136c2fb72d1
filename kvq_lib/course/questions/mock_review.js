// What came out, question by question: what was answered, what is right, and why.

function kvqSigned(good, words) {
  return kvqElement("span", `${good ? "✓" : "✗"} ${words}`,
    { class: good ? "kvqm-right" : "kvqm-wrong" });
}

function kvqReviewChoices(question, kept) {
  const list = kvqElement("ul");
  list.append(...kept.order.map((i) => {
    const choice = question.choices[i];
    const picked = (kept.answer ?? []).includes(i);
    const row = kvqElement("li");
    const words = `${choice.right ? "right" : "wrong"}${picked ? ", your choice" : ""}: `;
    row.append(kvqSigned(choice.right, words), kvqHtml("span", choice.text), " ",
      kvqHtml("em", choice.why));
    return row;
  }));
  return [list];
}

function kvqReviewNumber(question, kept) {
  const typed = (kept.answer ?? "").trim();
  const given = kvqReadNumber(typed, question.unit);
  const good = kvqMark(question, typed) > 0;
  const said = kvqElement("p");
  said.append(kvqSigned(good, typed ? `You answered ${typed}.` : "No answer."));
  const known = good || given === null ? null : kvqMistake(question, given);
  if (typed && given === null) said.append(` ${kvqWhyNot(typed, question.unit)}`);
  if (known) said.append(" ", kvqHtml("span", known.why));
  return [said, kvqElement("p", `Right: ${question.shown}.`),
    kvqHtml("div", question.why)];
}

function kvqReviewOpen(question, kept, place) {
  const typed = (kept.answer ?? "").trim();
  const list = kvqElement("ul");
  list.append(...question.rubric.map((line, i) => {
    const row = kvqElement("li");
    const label = kvqElement("label");
    const box = kvqElement("input", undefined,
      { type: "checkbox", "data-item": place, "data-line": i });
    box.checked = kept.met.includes(i);
    label.append(box, " ", kvqHtml("span", line.text), ` (${line.points})`);
    row.append(label);
    return row;
  }));
  const own = typed ? kvqElement("p", typed, { class: "kvqm-own" })
    : kvqElement("p", "No answer.");
  return [own, kvqElement("p", "A good answer:"), kvqHtml("div", question.model),
    kvqElement("p", "Tick what your answer says:"), list];
}

function kvqWorth(question, kept) {
  const points = kvqPoints(question, kept);
  const words = `${kvqNumber(points)} of 1`;
  if (points === 0 || points === 1) return kvqSigned(points === 1, words);
  return kvqElement("span", `◐ ${words}`, { class: "kvqm-partly" });
}

// One question with what was answered, what is right, and why.
function kvqReviewed(question, kept, place) {
  const row = kvqElement("li");
  const worth = kvqElement("p", undefined, { "data-points": place });
  worth.append(kvqWorth(question, kept));
  const { href, number, title } = question.section;
  const link = kvqElement("p", "Section ");
  link.append(kvqElement("a", `${number} ${title}`, { href }));
  const parts = question.choices ? kvqReviewChoices(question, kept)
    : question.kind === "open" ? kvqReviewOpen(question, kept, place)
      : kvqReviewNumber(question, kept);
  row.append(worth, kvqHtml("div", question.question), ...parts, link);
  if (question.sources) row.append(kvqHtml("p", `Sources: ${question.sources}`, { class: "kvqm-note" }));
  return row;
}

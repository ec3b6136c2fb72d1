// Parts of the mock interview's page.

const KVQ_ASKS = {
  single: "choose one", multiple: "choose all that are right", numeric: "a number",
  open: "in your own words",
};
const KVQ_KINDS = {
  single: "one of several", multiple: "several of several", numeric: "numbers", open: "open",
};

function kvqElement(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Texts of the bank: HTML that the build made, formulas included.
function kvqHtml(name, html, attributes = {}) {
  const made = kvqElement(name, undefined, attributes);
  made.innerHTML = html;
  return made;
}

function kvqTypeset(element) {
  const mathjax = window.MathJax;
  if (!mathjax?.typesetPromise) return; // it will find the formulas when it starts
  mathjax.startup.promise =
    mathjax.startup.promise.then(() => mathjax.typesetPromise([element]));
}

const kvqNumber = (n) => String(Math.round(100 * n) / 100);

// Where an answer is given, with what was answered before.
function kvqField(question, kept) {
  if (question.choices) {
    const type = question.kind === "single" ? "radio" : "checkbox";
    return kept.order.map((i) => {
      const label = kvqElement("label", undefined, { class: "kvqm-choice" });
      const box = kvqElement("input", undefined, { type, name: "kvqm-choice", value: i });
      box.checked = (kept.answer ?? []).includes(i);
      label.append(box, kvqHtml("span", question.choices[i].text));
      return label;
    });
  }
  const open = question.kind === "open";
  const unit = kvqAskedIn(question.unit ?? "");
  const box = kvqElement(open ? "textarea" : "input", undefined,
    { id: "kvqm-typed", "aria-describedby": "kvqm-hint" });
  if (!open) Object.assign(box, { type: "text", autocomplete: "off", spellcheck: false });
  else box.maxLength = KVQ_MOST.text;
  box.value = kept.answer ?? "";
  return [kvqElement("label", `Your answer${unit}`, { for: "kvqm-typed" }), box];
}

// Why what was typed is no number; "" if it is one, or nothing.
function kvqHint(question, kept) {
  if (question.kind !== "numeric" || !(kept.answer ?? "").trim()) return "";
  return kvqWhyNot(kept.answer, question.unit);
}

function kvqCheckboxes(shown, name, labels) {
  shown(name).replaceChildren(...Object.entries(labels).map(([key, label]) => {
    const made = kvqElement("label");
    const box = kvqElement("input", undefined, { type: "checkbox", name, value: key });
    box.checked = true;
    made.append(box, ` ${label}`);
    return made;
  }));
}

function kvqWeakest(bank, topics) {
  const share = ([, row]) => row[1] / row[0];
  const [topic] = Object.entries(topics).sort((a, b) => share(a) - share(b))[0] ?? [""];
  return bank.topics[topic] ?? topic;
}

// An interview of the past as a row of a table.
function kvqHistoryRow(bank, entry) {
  const row = kvqElement("tr");
  const when = entry.when.slice(0, 16).replace("T", " ");
  row.append(kvqElement("th", `${when} UTC`, { scope: "row" }));
  row.append(...[entry.all[0], `${kvqNumber(entry.all[1])} of ${entry.all[0]}`,
    kvqWeakest(bank, entry.topics)].map((cell) => kvqElement("td", cell)));
  return row;
}

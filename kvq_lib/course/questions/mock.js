// The mock interview on its page: a form, a question at a time, and what came out.

const KVQ_ASKS = {
  single: "choose one", multiple: "choose all that are right", numeric: "a number",
  open: "in your own words",
};
const KVQ_KINDS = {
  single: "one of several", multiple: "several of several", numeric: "numbers", open: "open",
};
const KVQ_WARNINGS = [[300, "Five minutes left."], [60, "One minute left."],
  [10, "Ten seconds left."]];

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

function kvqMock(root, bank) {
  const shown = (name) => root.querySelector(`[data-show="${name}"]`);
  const part = (name) => root.querySelector(`[data-part="${name}"]`);
  const find = new Map(bank.questions.map((q) => [q.id, q]));
  const store = kvqStore();
  let state = store.read();
  let sure = null; // what a second press of a button would do

  function say(words) {
    shown("message").textContent = words;
  }

  function save() {
    store.write(state);
    showHistory();
  }

  // Asks once before something cannot be taken back.
  function surely(what, words) {
    if (sure === what) {
      sure = null;
      say("");
      return true;
    }
    sure = what;
    say(words);
    return false;
  }

  // -- a new interview

  function checkboxes(name, labels) {
    shown(name).replaceChildren(...Object.entries(labels).map(([key, label]) => {
      const made = kvqElement("label");
      const box = kvqElement("input", undefined, { type: "checkbox", name, value: key });
      box.checked = true;
      made.append(box, ` ${label}`);
      return made;
    }));
  }

  const ticked = (name) =>
    [...root.querySelectorAll(`input[name="${name}"]:checked`)].map((box) => box.value);

  // What the form says; null for a number that makes no sense.
  function wish() {
    const whole = (id) => {
      const input = root.querySelector(id);
      const value = Number(input.value);
      const good = input.value.trim() !== "" && Number.isInteger(value)
        && value >= Number(input.min) && value <= Number(input.max || Infinity);
      input.setAttribute("aria-invalid", String(!good));
      return good ? value : null;
    };
    return {
      topics: ticked("topics"), levels: ticked("levels"), kinds: ticked("kinds"),
      number: whole("#kvqm-number"), minutes: whole("#kvqm-minutes"),
    };
  }

  function showFit() {
    const asked = wish();
    const fit = kvqFitting(bank, asked).length;
    const words = [`${fit} of ${bank.questions.length} questions fit.`];
    if (!fit) words.push("Choose a topic, a level and a kind.");
    else if (asked.number === null) words.push("Say how many, at least 1.");
    else if (asked.number > fit) words.push("All of them will be asked.");
    if (asked.minutes === null) words.push("Minutes are a whole number from 0 to 600.");
    shown("fit").textContent = words.join(" ");
    return fit > 0 && asked.number !== null && asked.minutes !== null ? asked : null;
  }

  function start() {
    const asked = showFit();
    if (!asked) return;
    state.session = kvqSession(bank, asked, Date.now());
    last = Infinity;
    shown("warning").textContent = "";
    save();
    say("");
    show(true);
  }

  // -- a question at a time

  function item() {
    return state.session.items[state.session.at];
  }

  function field(question, kept) {
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
    const unit = question.unit ? `, in ${question.unit}` : "";
    const box = kvqElement(open ? "textarea" : "input", undefined, { id: "kvqm-typed" });
    if (!open) Object.assign(box, { type: "text", autocomplete: "off", spellcheck: false });
    box.value = kept.answer ?? "";
    return [kvqElement("label", `Your answer${unit}`, { for: "kvqm-typed" }), box];
  }

  function noteAnswer() {
    const boxes = [...shown("answer").querySelectorAll("[name=kvqm-choice]")];
    item().answer = boxes.length
      ? boxes.filter((box) => box.checked).map((box) => Number(box.value))
      : shown("answer").querySelector("#kvqm-typed").value;
    save();
    showJumps();
  }

  function showJumps() {
    const { items, at } = state.session;
    shown("jumps").replaceChildren(...items.map((one, i) => {
      const answered = kvqAnswered(one);
      const button = kvqElement("button", `${i + 1}${answered ? "•" : ""}`, {
        type: "button", "data-jump": i,
        "aria-label": `Question ${i + 1}, ${answered ? "answered" : "no answer yet"}`,
      });
      if (i === at) button.setAttribute("aria-current", "step");
      return button;
    }));
  }

  function showQuestion(move) {
    const { items, at } = state.session;
    const question = find.get(item().id);
    shown("count").textContent = `Question ${at + 1} of ${items.length}`;
    shown("place").textContent =
      `${bank.topics[question.topic]} · ${question.level} · ${KVQ_ASKS[question.kind]}`;
    shown("question").innerHTML = question.question;
    shown("answer").replaceChildren(...field(question, item()));
    root.querySelector("[data-do=previous]").disabled = at === 0;
    root.querySelector("[data-do=next]").textContent =
      at + 1 < items.length ? "Next" : "Finish";
    showJumps();
    tick();
    kvqTypeset(part("session"));
    if (move) shown("count").focus();
  }

  function go(to) {
    sure = null;
    say("");
    state.session.at = to;
    save();
    showQuestion(true);
  }

  function finish(words, move = true) {
    const { deadline } = state.session;
    state.session.finished = Math.min(Date.now(), deadline ?? Infinity);
    state.history = kvqMerged(state.history, [kvqEntry(bank, state.session)]);
    save();
    show(move);
    say(words);
  }

  function wantFinish() {
    const missing = state.session.items.filter((one) => !kvqAnswered(one)).length;
    const are = missing === 1 ? "1 question has" : `${missing} questions have`;
    if (!missing || surely("finish", `${are} no answer. Press again to finish.`)) finish("");
  }

  let last = Infinity; // seconds that were left at the last look
  function tick() {
    const session = state.session;
    if (!session || session.finished) return;
    if (session.deadline === null) {
      shown("timer").textContent = "no time limit";
      return;
    }
    const left = session.deadline - Date.now();
    if (left <= 0) {
      finish("Time is up.");
      return;
    }
    shown("timer").textContent = kvqClock(left);
    shown("timer").classList.toggle("kvqm-late", left < 60_000);
    for (const [seconds, words] of KVQ_WARNINGS)
      if (last > seconds && left / 1000 <= seconds && last !== Infinity)
        shown("warning").textContent = words;
    last = left / 1000;
  }

  // -- what came out

  function showScore() {
    const { topics, all } = kvqScore(bank, state.session);
    const seconds = state.session.finished - state.session.started;
    shown("score").textContent =
      `${kvqNumber(all[1])} of ${all[0]} points, ${Math.round((100 * all[1]) / all[0])}%, `
      + `in ${kvqClock(seconds)} minutes.`;
    shown("topic-scores").replaceChildren(...Object.entries(topics).map(([topic, row]) => {
      const made = kvqElement("tr");
      made.append(kvqElement("th", bank.topics[topic], { scope: "row" }));
      made.append(...row.map((n) => kvqElement("td", kvqNumber(n))));
      return made;
    }));
  }

  function showResults(move) {
    showScore();
    shown("review").replaceChildren(...state.session.items.map(
      (kept, place) => kvqReviewed(find.get(kept.id), kept, place)));
    kvqTypeset(part("results"));
    if (move) root.querySelector("#kvqm-results").focus();
  }

  function markOwn(box) {
    const place = Number(box.dataset.item);
    const kept = state.session.items[place];
    const line = Number(box.dataset.line);
    kept.met = kept.met.filter((i) => i !== line).concat(box.checked ? [line] : []);
    state.history = kvqMerged(state.history, [kvqEntry(bank, state.session)]);
    save();
    showScore();
    root.querySelector(`[data-points="${place}"]`).replaceChildren(
      kvqWorth(find.get(kept.id), kept));
  }

  // -- progress

  function weakest(topics) {
    const rows = Object.entries(topics);
    const share = ([, row]) => row[1] / row[0];
    const [topic] = rows.sort((a, b) => share(a) - share(b))[0] ?? [""];
    return bank.topics[topic] ?? topic;
  }

  function showHistory() {
    const { history } = state;
    const times = history.length === 1 ? "1 interview" : `${history.length} interviews`;
    shown("history-note").textContent = !store.kept
      ? "This browser keeps nothing for this page: export your progress before you leave."
      : `${history.length ? `${times} so far.` : "No interview yet."} `
        + "All of it stays in this browser.";
    shown("history-table").hidden = history.length === 0;
    shown("history").replaceChildren(...history.map((entry) => {
      const row = kvqElement("tr");
      const when = entry.when.slice(0, 16).replace("T", " ");
      row.append(kvqElement("th", `${when} UTC`, { scope: "row" }));
      row.append(...[entry.all[0], `${kvqNumber(entry.all[1])} of ${entry.all[0]}`,
        weakest(entry.topics)].map((cell) => kvqElement("td", cell)));
      return row;
    }));
  }

  function exportProgress() {
    const content = { kind: KVQ_EXPORT, version: 1, history: state.history };
    const blob = new Blob([JSON.stringify(content, null, 1)], { type: "application/json" });
    const link = kvqElement("a", undefined,
      { href: URL.createObjectURL(blob), download: "kvq-progress.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    say("Exported as kvq-progress.json.");
  }

  async function importProgress(file) {
    try {
      const before = state.history.length;
      state.history = kvqMerged(state.history, kvqImported(await file.text()));
      save();
      say(`Imported: ${state.history.length - before} interviews were new.`);
    } catch (error) {
      say(error.message);
    }
  }

  // -- everything

  function show(move) {
    const { session } = state;
    const name = !session ? "setup" : session.finished ? "results" : "session";
    for (const other of ["setup", "session", "results"]) part(other).hidden = other !== name;
    if (name === "results") showResults(move);
    else if (name === "session") showQuestion(move);
    else {
      showFit();
      if (move) shown("setup-title").focus();
    }
    showHistory();
  }

  const todo = {
    "every-topic": () => tickTopics(true),
    "no-topic": () => tickTopics(false),
    previous: () => go(Math.max(0, state.session.at - 1)),
    finish: wantFinish,
    again() {
      state.session = null;
      save();
      say("");
      show(true);
    },
    print: () => window.print(),
    export: exportProgress,
    import: () => shown("file").click(),
    forget() {
      if (!surely("forget", "Press Delete again to delete all interviews.")) return;
      state.history = [];
      save();
      say("Deleted.");
    },
  };

  function tickTopics(on) {
    for (const box of root.querySelectorAll("input[name=topics]")) box.checked = on;
    showFit();
  }

  checkboxes("topics", Object.fromEntries(Object.entries(bank.topics).map(([key, title]) =>
    [key, `${title} (${bank.questions.filter((q) => q.topic === key).length})`])));
  checkboxes("levels", { easy: "easy", mid: "mid", hard: "hard" });
  checkboxes("kinds", KVQ_KINDS);
  root.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.jump) go(Number(button.dataset.jump));
    else if (button.type !== "submit") todo[button.dataset.do]?.();
  });
  part("setup").addEventListener("input", showFit);
  part("setup").addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  shown("answer").addEventListener("input", noteAnswer);
  part("session").addEventListener("submit", (event) => {
    event.preventDefault();
    const { at, items } = state.session;
    if (at + 1 < items.length) go(at + 1);
    else wantFinish();
  });
  shown("review").addEventListener("change", (event) => markOwn(event.target));
  shown("file").addEventListener("change", (event) => {
    const [file] = event.target.files;
    if (file) importProgress(file);
    event.target.value = "";
  });
  setInterval(tick, 500);
  root.kvq = { bank, mark: kvqMark, readNumber: kvqReadNumber };
  const found = state.session;
  const dead = found && !kvqGoodSession(bank, found);
  if (dead) state.session = null;
  show(false);
  if (dead) say("The questions have changed, so the interview that was running is gone.");
}

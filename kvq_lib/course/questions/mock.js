// The mock interview on its page: a form, a question at a time, and what came out.

const KVQ_WARNINGS = [[300, "Five minutes left."], [60, "One minute left."],
  [10, "Ten seconds left."]];

function kvqMock(root, bank) {
  const shown = (name) => root.querySelector(`[data-show="${name}"]`);
  const part = (name) => root.querySelector(`[data-part="${name}"]`);
  const find = new Map(bank.questions.map((q) => [q.id, q]));
  const store = kvqStore(bank);
  let state = { session: null, history: [] }; // what this tab shows of what is kept
  let at = 0; // the place of the question that this tab shows
  let sure = null; // what a second press of a button would do

  function say(words) {
    shown("message").textContent = words;
  }

  const sessionIn = (kept, id = state.session?.id) =>
    kept.sessions.find((session) => session.id === id) ?? null;

  function take(kept, session) {
    state = { session, history: kept.history };
    kvqTab.set(session?.id ?? null);
    showHistory();
  }

  // Change what is kept of the interview that this tab shows, which goes on or is
  // finished. If another tab has ended or removed it, nothing is changed but this tab.
  function change(how, finished = false) {
    const kept = store.change((now) => {
      const session = sessionIn(now);
      if (!session || (session.finished !== null) !== finished) return false;
      return how(session, now);
    });
    return follow(kept);
  }

  // Show what is kept now; false if the interview of this tab is another one by now.
  function follow(kept) {
    const before = state.session;
    const after = sessionIn(kept);
    take(kept, after);
    if (Boolean(before) === Boolean(after) && before?.finished === after?.finished) return true;
    show(false);
    say(after ? "This interview was finished in another tab."
      : "This interview was removed in another tab.");
    return false;
  }

  function otherTab() {
    const shownBefore = JSON.stringify(state.session);
    if (!follow(store.read()) || JSON.stringify(state.session) === shownBefore) return;
    if (state.session.finished) showResults(false);
    else showQuestion(false);
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
    const session = kvqSession(bank, asked, Date.now());
    at = 0;
    last = Infinity;
    shown("warning").textContent = "";
    take(store.change((kept) => { kept.sessions.push(session); }), session);
    say("");
    show(true);
  }

  // -- a question at a time

  function item() {
    return state.session.items[at];
  }

  function noteAnswer() {
    const boxes = [...shown("answer").querySelectorAll("[name=kvqm-choice]")];
    const answer = boxes.length
      ? boxes.filter((box) => box.checked).map((box) => Number(box.value))
      : shown("answer").querySelector("#kvqm-typed").value;
    if (!change((session) => { session.items[at].answer = answer; })) return;
    showHint();
    showJumps();
  }

  const answered = (one) => kvqAnswered(find.get(one.id), one);

  function showHint() {
    const hint = kvqHint(find.get(item().id), item());
    shown("hint").textContent = hint;
    shown("answer").querySelector("#kvqm-typed")?.setAttribute(
      "aria-invalid", String(hint !== ""));
  }

  function showJumps() {
    const { items } = state.session;
    shown("jumps").replaceChildren(...items.map((one, i) => {
      const done = answered(one);
      const button = kvqElement("button", `${i + 1}${done ? "•" : ""}`, {
        type: "button", "data-jump": i,
        "aria-label": `Question ${i + 1}, ${done ? "answered" : "no answer yet"}`,
      });
      if (i === at) button.setAttribute("aria-current", "step");
      return button;
    }));
  }

  function showQuestion(move) {
    const { items } = state.session;
    const question = find.get(item().id);
    shown("count").textContent = `Question ${at + 1} of ${items.length}`;
    shown("place").textContent =
      `${bank.topics[question.topic]} · ${question.level} · ${KVQ_ASKS[question.kind]}`;
    shown("question").innerHTML = question.question;
    shown("answer").replaceChildren(...kvqField(question, item()));
    showHint();
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
    at = to;
    if (change((session) => { session.at = to; })) showQuestion(true);
  }

  function finish(words, move = true) {
    let ended = null;
    const kept = store.change((now) => {
      ended = sessionIn(now);
      if (!ended || ended.finished !== null) return false;
      ended.finished = Math.min(Date.now(), ended.deadline ?? Infinity);
      now.history = kvqMerged(now.history, [kvqEntry(bank, ended)]);
      return true;
    });
    take(kept, ended);
    show(move);
    say(ended ? words : "This interview was removed in another tab.");
  }

  function wantFinish() {
    const missing = state.session.items.filter((one) => !answered(one)).length;
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
    const line = Number(box.dataset.line);
    const there = change((session, kept) => {
      const one = session.items[place];
      one.met = one.met.filter((i) => i !== line).concat(box.checked ? [line] : []);
      // An interview that was deleted does not come back.
      if (kept.history.some((entry) => entry.id === session.id))
        kept.history = kvqMerged(kept.history, [kvqEntry(bank, session)]);
    }, true);
    if (!there) return;
    showScore();
    const one = state.session.items[place];
    root.querySelector(`[data-points="${place}"]`).replaceChildren(
      kvqWorth(find.get(one.id), one));
  }

  // -- progress

  function showHistory() {
    const { history } = state;
    const times = history.length === 1 ? "1 interview" : `${history.length} interviews`;
    shown("history-note").textContent = !store.kept
      ? "This browser keeps nothing for this page: export your progress before you leave."
      : `${history.length ? `${times} so far.` : "No interview yet."} `
        + "All of it stays in this browser.";
    shown("history-table").hidden = history.length === 0;
    shown("history").replaceChildren(
      ...history.map((entry) => kvqHistoryRow(bank, entry)));
  }

  function exportProgress() {
    const { history } = store.read();
    const content = { kind: KVQ_EXPORT, version: KVQ_VERSION, history };
    const blob = new Blob([JSON.stringify(content, null, 1)], { type: "application/json" });
    const link = kvqElement("a", undefined,
      { href: URL.createObjectURL(blob), download: "kvq-progress.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    say("Exported as kvq-progress.json.");
  }

  async function importProgress(file) {
    try {
      if (file.size > KVQ_MOST.file) throw new Error("This file is too large.");
      const found = kvqImported(await file.text());
      let before = [];
      const kept = store.change((now) => {
        before = now.history;
        now.history = kvqMerged(now.history, found);
      });
      const { fresh, other } = kvqCompared(before, kept.history);
      follow(kept);
      say(`Imported: ${fresh} new, ${other} changed, ${kept.history.length} in all.`);
    } catch (error) {
      say(error.message);
    }
  }

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
    previous: () => go(Math.max(0, at - 1)),
    finish: wantFinish,
    again() {
      take(store.change((kept) => {
        kept.sessions = kept.sessions.filter((one) => one.id !== state.session?.id);
      }), null);
      say("");
      show(true);
    },
    print: () => window.print(),
    export: exportProgress,
    import: () => shown("file").click(),
    forget() {
      if (!surely("forget", "Press Delete again to delete all interviews.")) return;
      const kept = store.change((now) => {
        now.history = [];
        now.sessions = now.sessions.filter(
          (one) => one.finished === null || one.id === state.session?.id);
      });
      follow(kept);
      say("Deleted.");
    },
  };

  function tickTopics(on) {
    for (const box of root.querySelectorAll("input[name=topics]")) box.checked = on;
    showFit();
  }

  kvqCheckboxes(shown, "topics", Object.fromEntries(Object.entries(bank.topics).map(([key, title]) =>
    [key, `${title} (${bank.questions.filter((q) => q.topic === key).length})`])));
  kvqCheckboxes(shown, "levels", { easy: "easy", mid: "mid", hard: "hard" });
  kvqCheckboxes(shown, "kinds", KVQ_KINDS);
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
    if (at + 1 < state.session.items.length) go(at + 1);
    else wantFinish();
  });
  shown("review").addEventListener("change", (event) => markOwn(event.target));
  shown("file").addEventListener("change", (event) => {
    const [file] = event.target.files;
    if (file) importProgress(file);
    event.target.value = "";
  });
  setInterval(tick, 500);
  root.kvq = { bank, mark: kvqMark, readNumber: kvqReadNumber, whyNot: kvqWhyNot };
  window.addEventListener("storage", (event) => {
    if (event.key === KVQ_KEY || event.key === null) otherTab();
  });
  // A page that comes back from the history of the browser has missed what was told.
  window.addEventListener("pageshow", (event) => { if (event.persisted) otherTab(); });
  begin();

  // Go on with this tab's interview, else with the newest, one that runs before others.
  function begin() {
    const kept = store.read();
    const { lost } = store;
    if (lost) store.change(() => true);
    const newest = [...kept.sessions].sort((a, b) => b.started - a.started);
    const session = sessionIn(kept, kvqTab.get())
      ?? newest.find((one) => one.finished === null) ?? newest[0] ?? null;
    take(kept, session);
    at = session?.at ?? 0;
    show(false);
    if (lost === "damaged")
      say("What this browser had kept was damaged; what could not be read is gone.");
    if (lost === "changed")
      say("The questions have changed, so the interview that was running is gone.");
  }
}

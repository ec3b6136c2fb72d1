// What jupyterquiz lacks: keys, labels, a button beside numbers, formulas in time.

// Formulas that came into the page after MathJax had looked at it.
function kvqTypeset(element) {
  const mathjax = window.MathJax;
  if (mathjax?.typesetPromise)
    mathjax.startup.promise =
      mathjax.startup.promise.then(() => mathjax.typesetPromise([element]));
  else if (mathjax?.Hub) mathjax.Hub.Queue(["Typeset", mathjax.Hub, element]);
}

// A choice becomes a button: a hidden radio button would take each arrow key for an answer.
function kvqQuizChoice(label, labels, feedback) {
  label.querySelector("input").remove();
  label.setAttribute("role", "button");
  label.tabIndex = 0;
  const tell = () => {
    for (const other of labels) {
      const marked = /\b(in)?correctButton\b/.test(other.className);
      other.setAttribute("aria-pressed", String(marked));
    }
    kvqTypeset(feedback);
  };
  tell();
  label.addEventListener("click", tell);
  label.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    label.click();
  });
}

// A number: anything can be typed and pasted, and what was typed stays.
function kvqQuizNumber(input, unit, feedback) {
  const check = input.onkeypress;
  input.onkeypress = input.onpaste = null;
  input.addEventListener("focus", (event) => event.stopImmediatePropagation(), true);
  input.autocomplete = "off";
  const label = input.parentElement.querySelector("label");
  label.htmlFor = input.id;
  label.textContent = `Your answer${kvqAskedIn(unit)}:`;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Check";
  input.after(button);
  const mark = () => {
    const typed = input.value;
    const given = kvqReadNumber(typed, unit);
    const from = document.activeElement;
    if (given === null) {
      feedback.textContent = `✗ ${kvqWhyNot(typed, unit)}`;
      feedback.className = "Feedback incorrect";
      return;
    }
    input.value = String(given);
    check.call(input, { which: 13, keyCode: 13 });
    input.value = typed;
    from.focus(); // it would go to the next question
    kvqTypeset(feedback);
  };
  button.addEventListener("click", mark);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    mark();
  });
}

function kvqQuiz(root, units, make) {
  make(undefined, { log() {}, error: (...words) => window.console.error(...words) });
  for (const question of root.querySelectorAll(".Quiz")) {
    const feedback = question.querySelector(".Feedback");
    feedback.setAttribute("role", "status");
    feedback.setAttribute("aria-live", "polite");
    const answers = question.querySelector(".Answer");
    answers.setAttribute("role", "group");
    answers.setAttribute("aria-labelledby", question.querySelector("[id^=quizQn]").id);
    const input = answers.querySelector(".Input-text");
    const labels = answers.querySelectorAll(".MCButton");
    if (input) kvqQuizNumber(input, units[question.dataset.qnum], feedback);
    for (const label of labels) kvqQuizChoice(label, labels, feedback);
  }
  kvqTypeset(root);
}

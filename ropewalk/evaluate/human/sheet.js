// The sheet of one rater: shows the items one by one, keeps the answers in this browser, saves them as a file.
"use strict";

const WORDS = {
  en: {
    title: "Rating sheet", instructions: "Instructions", prompt: "Beginning of the text", text: "Continuation",
    empty: "(nothing: the text ends here)", same: "no difference", comment: "Comment (optional)",
    previous: "Previous", next: "Next", open: "Next unanswered", item: (n, all) => `Item ${n} of ${all}`,
    count: (n, all) => `${n} of ${all} items answered`, csv: "Save as CSV", json: "Save as JSON",
    kept: "Answers are kept in this browser.",
    lost: "This browser does not keep answers: save the file before you close the page.",
    left: (n) => `${n} unanswered. You may save now and go on later, or send an incomplete sheet.`,
    all: "All items are answered. Save the file and send it back.", language: "中文", other: "zh",
    keys: "Keys: a digit answers the marked question, Enter goes to the next item, Shift+Enter to the previous one.",
  },
  zh: {
    title: "评分表", instructions: "说明", prompt: "文字的开头", text: "续写",
    empty: "（没有内容：文字到此结束）", same: "没有差别", comment: "备注（可不填）",
    previous: "上一项", next: "下一项", open: "下一个未答项", item: (n, all) => `第 ${n} 项，共 ${all} 项`,
    count: (n, all) => `已答 ${n} 项，共 ${all} 项`, csv: "保存为 CSV", json: "保存为 JSON",
    kept: "答案保存在此浏览器中。", lost: "此浏览器不能保存答案：关闭页面前请先保存文件。",
    left: (n) => `还有 ${n} 项未答。可以先保存，以后继续，也可以寄回未完成的表。`,
    all: "全部完成。请保存文件并寄回。", language: "English", other: "en",
    keys: "按键：数字键回答标出的问题，Enter 到下一项，Shift+Enter 到上一项。",
  },
};

const content = JSON.parse(document.getElementById("content").textContent);
const root = document.getElementById("sheet");
const place = `ropewalk-${content.sheet}`;
const state = { answers: {}, comments: {}, at: 0, active: 0, language: navigator.language.startsWith("zh") ? "zh" : "en" };
let keeps = true;
let saved = true;

function recall() {
  try {
    Object.assign(state, JSON.parse(localStorage.getItem(place) || "{}"));
  } catch {
    keeps = false;
  }
  state.at = Math.min(Math.max(state.at | 0, 0), content.items.length - 1);
  state.active = 0;
}

function remember() {
  try {
    localStorage.setItem(place, JSON.stringify(state));
  } catch {
    keeps = false;
  }
}

/** An element with properties and children; strings become text, never markup. */
function make(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const answered = (item) => content.questions.every((question) => (state.answers[item.id] || {})[question.name] !== undefined);
const open = () => content.items.filter((item) => !answered(item)).length;

function answer(name, value) {
  const id = content.items[state.at].id;
  state.answers[id] = { ...state.answers[id], [name]: value };
  saved = false;
  remember();
  progress();
}

/** The first unanswered question of the item shown, which digits answer. */
function activate(number) {
  const given = state.answers[content.items[state.at].id] || {};
  const first = content.questions.findIndex((question) => given[question.name] === undefined);
  state.active = number ?? (first < 0 ? content.questions.length - 1 : first);
  root.querySelectorAll("fieldset").forEach((field, index) => field.classList.toggle("active", index === state.active));
}

function go(to) {
  state.at = Math.min(Math.max(to, 0), content.items.length - 1);
  remember();
  draw();
  window.scrollTo(0, 0);
  document.getElementById("heading").focus({ preventScroll: true });
}

function nextOpen() {
  const count = content.items.length;
  for (let step = 1; step <= count; step += 1) {
    const to = (state.at + step) % count;
    if (!answered(content.items[to])) return go(to);
  }
}

function block(title, text, fresh) {
  const words = WORDS[state.language];
  // Readers see where a long text can be scrolled, and reach it by keyboard.
  return make("section", { className: fresh ? "" : "prompt" },
    make("h2", {}, title),
    make("p", { className: fresh ? "text new" : "text", tabIndex: text.length > 1500 ? 0 : -1 }, text.trim() ? text : words.empty));
}

function label(value) {
  if (content.mode !== "pairwise") return String(value);
  return { "-1": "A", 0: WORDS[state.language].same, 1: "B" }[value];
}

function field(question, index) {
  const item = content.items[state.at];
  const given = (state.answers[item.id] || {})[question.name];
  const choices = question.values.map((value) => {
    const input = make("input", { type: "radio", name: `${item.id} ${question.name}`, value: String(value), checked: given === value });
    input.addEventListener("change", () => { answer(question.name, value); activate(); });
    return make("label", {}, input, make("span", {}, label(value)));
  });
  const ends = content.mode === "pairwise" ? ["", ""] : [question.low[state.language], question.high[state.language]];
  const meant = [[question.values[0], ends[0]], [question.values.at(-1), ends[1]]].filter(([, text]) => text);
  const end = make("div", { className: "end" }, meant.map(([value, text]) => `${value} = ${text}`).join(" · "));
  const scale = make("div", { className: "scale" }, ...choices);
  const made = make("fieldset", {}, make("legend", {}, question.text[state.language], end), scale);
  made.addEventListener("focusin", () => activate(index));
  return made;
}

function progress() {
  const words = WORDS[state.language];
  const left = open();
  const all = content.items.length;
  document.getElementById("count").textContent = words.count(all - left, all);
  document.getElementById("bar").value = all - left;
  document.getElementById("kept").textContent = keeps ? words.kept : words.lost;
  const said = document.getElementById("left");
  said.textContent = left ? words.left(left) : words.all;
  said.classList.toggle("all", !left);
  document.getElementById("open").disabled = !left;
}

function button(text, action, properties = {}) {
  const made = make("button", { type: "button", ...properties }, text);
  made.addEventListener("click", action);
  return made;
}

function draw() {
  const words = WORDS[state.language];
  const item = content.items[state.at];
  const all = content.items.length;
  document.documentElement.lang = state.language === "zh" ? "zh-Hans" : "en";
  document.title = `${words.title} ${content.sheet}`;
  const fresh = content.mode === "pairwise"
    ? make("div", { className: "pair" }, block("A", item.texts[0], true), block("B", item.texts[1], true))
    : block(words.text, item.texts[0], true);
  const note = make("textarea", { rows: 1, value: state.comments[item.id] || "" });
  note.addEventListener("input", () => { state.comments[item.id] = note.value; saved = false; remember(); });
  const bar = make("progress", { id: "bar", max: all, value: 0 });
  bar.setAttribute("aria-labelledby", "count");
  const count = make("span", { id: "count", className: "count" });
  count.setAttribute("aria-live", "polite");
  const about = make("details", { className: "card", open: state.at === 0 },
    make("summary", {}, words.instructions), make("p", {}, content.instructions[state.language]));
  root.replaceChildren(
    make("header", {},
      make("div", { className: "bar" }, count, make("span", { id: "kept", className: "said" }),
        make("span", { className: "right" }, button(words.language, () => { state.language = words.other; remember(); draw(); }))),
      bar),
    make("main", {}, about,
      make("div", { className: content.mode === "pairwise" ? "work" : "work one" },
        make("div", { className: "card" },
          make("h1", { id: "heading", tabIndex: -1 }, words.item(state.at + 1, all)),
          block(words.prompt, item.prompt, false), fresh),
        make("div", { className: "card ask" }, ...content.questions.map(field),
          make("label", { className: "comment" }, words.comment, note),
          make("nav", {},
            button(words.previous, () => go(state.at - 1), { disabled: state.at === 0 }),
            button(words.next, () => go(state.at + 1), { className: "main", disabled: state.at === all - 1 }),
            button(words.open, nextOpen, { id: "open" })))),
      make("p", { className: "keys" }, words.keys),
      make("section", { className: "save card" }, make("p", { id: "left" }),
        make("nav", {}, button(words.csv, () => save("csv")), button(words.json, () => save("json"))))));
  activate();
  progress();
}

const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);

function filled(kind) {
  const names = content.questions.map((question) => question.name);
  const rows = content.items.map((item) => ({
    id: item.id, scores: state.answers[item.id] || {}, comment: state.comments[item.id] || "",
  }));
  if (kind === "json") return JSON.stringify({ format: 1, sheet: content.sheet, ratings: rows }, null, 1);
  const lines = rows.map((row) => [content.sheet, row.id, ...names.map((name) => String(row.scores[name] ?? "")), row.comment]);
  return [["sheet", "id", ...names, "comment"], ...lines].map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n";
}

function save(kind) {
  const link = make("a", { download: `filled-${content.sheet}.${kind}` });
  link.href = URL.createObjectURL(new Blob([filled(kind)], { type: kind === "json" ? "application/json" : "text/csv" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  saved = true;
}

document.addEventListener("keydown", (event) => {
  if (event.target.matches("textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" && !event.target.matches("button, summary, a")) {
    event.preventDefault();
    go(state.at + (event.shiftKey ? -1 : 1));
  } else if (/^[0-9]$/.test(event.key)) {
    const question = content.questions[state.active];
    // A digit means the value of that name; of a pair, the first, second and third choice.
    const digit = Number(event.key);
    const meant = digit === 0 && !question.values.includes(0) ? 10 : digit;
    const value = content.mode === "pairwise" ? question.values[digit - 1] : question.values.find((each) => each === meant);
    if (value === undefined) return;
    event.preventDefault();
    root.querySelectorAll("fieldset")[state.active].querySelector(`input[value="${value}"]`).checked = true;
    answer(question.name, value);
    document.activeElement?.blur();
    activate();
  }
});
window.addEventListener("beforeunload", (event) => {
  if (!keeps && !saved) event.preventDefault();
});
recall();
draw();

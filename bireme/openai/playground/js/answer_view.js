// An answer on the page: thoughts, content, tool calls, what went wrong, what it cost.

import { SentenceAnnouncer, announce } from "./announcer.js";
import { CallsView } from "./calls_view.js";
import { copyButton } from "./clipboard.js";
import { button, element, icon } from "./dom.js";
import { errorBlock, remedy } from "./error_view.js";
import { MarkdownView, codeBlock } from "./markdown.js";
import { ReasoningView } from "./reasoning_view.js";
import { StatsView } from "./stats_view.js";

/** `on` has the callbacks retry, results, key. */
export class AnswerView {
  #answer;
  #on;
  #content = element("div", { class: "prose content" });
  #markdown = new MarkdownView(this.#content);
  #stats = new StatsView();
  #foot = element("div", { class: "foot" });
  #after = element("div", { class: "after" });
  #announcer = new SentenceAnnouncer();
  #reasoning = null;
  #calls = null;
  #isEnded = false;
  #isNews; // is it told to screen readers? Not when it was there before the page

  constructor(answer, on) {
    this.#answer = answer;
    this.#on = on;
    this.#isNews = answer.isStreaming;
    if (!this.#isNews) this.#announcer.skip(answer.content);
    this.#foot.append(this.#stats.node);
    this.node = element(
      "article",
      { class: "turn answer streaming", "aria-label": "Answer", "aria-busy": "true" },
      this.#content,
      this.#after,
      this.#foot,
    );
  }

  /** Show the answer as it is, and how fast it comes. */
  show(summary) {
    const answer = this.#answer;
    this.#showReasoning(answer);
    if (answer.isJson) this.#showJson(answer.content);
    else this.#markdown.show(answer.content);
    this.#showCalls(answer);
    this.#stats.show(answer, summary);
    this.#announcer.tell(answer.content, !answer.isStreaming);
    if (!answer.isStreaming && !this.#isEnded) this.#end(answer);
  }

  /** Take away what only the newest answer has: ways to try again. */
  age() {
    for (const part of this.node.querySelectorAll(".retry, .error .row")) part.remove();
  }

  focusCalls() {
    this.#calls?.focus();
  }

  #showReasoning(answer) {
    const { reasoning, content, calls, isStreaming } = answer;
    if (!reasoning) return;
    if (!this.#reasoning) {
      this.#reasoning = new ReasoningView();
      this.node.prepend(this.#reasoning.node);
    }
    this.#reasoning.show(answer, Boolean(content || calls.length || !isStreaming));
  }

  #showJson(text) {
    const code = this.#content.querySelector("code");
    if (code) code.textContent = text;
    else if (text) this.#content.append(codeBlock(text, "json"));
  }

  #showCalls(answer) {
    if (!answer.calls.length) return;
    if (!this.#calls) {
      this.#calls = new CallsView((results) => this.#on.results(results));
      this.#content.after(this.#calls.node);
    }
    this.#calls.show(answer);
  }

  #end(answer) {
    this.#isEnded = true;
    this.node.classList.remove("streaming");
    this.node.removeAttribute("aria-busy");
    this.#after.append(...notices(answer, this.#on));
    const retry = answer.error
      ? null
      : button("retry", "Try again", () => this.#on.retry(), { class: "button icon-only small retry" });
    const actions = element("div", { class: "actions" }, retry); // an error has its own
    if (answer.requestId) actions.append(timelineLink(answer.requestId));
    if (answer.content) actions.prepend(copyButton("Copy answer", () => answer.content));
    this.#foot.prepend(actions);
    if (this.#isNews && !answer.error) announce(endOf(answer)); // an error is an alert by itself
  }
}

function timelineLink(id) {
  const shown = { class: "button icon-only small", "aria-label": "Timeline", title: "Timeline" };
  return element("a", { ...shown, href: `#timeline=${encodeURIComponent(id)}` }, icon("clock"));
}

function notices(answer, on) {
  if (answer.error) {
    const remedies = [remedy("retry", "Try again", on.retry)];
    if (answer.error.needsKey) remedies.unshift(remedy("key", "Enter a key", on.key));
    return [errorBlock(answer.error, remedies)];
  }
  if (answer.isStopped) return [element("p", { class: "notice" }, "Stopped.")];
  if (answer.finishReason === "length")
    return [element("p", { class: "notice" }, "Cut off: the limit of tokens was reached.")];
  return answer.isEmpty ? [element("p", { class: "notice" }, "The model ended without a word.")] : [];
}

function endOf(answer) {
  if (answer.isStopped) return "Stopped";
  if (answer.isWaiting)
    return `The model calls ${answer.calls.map((call) => call.name).join(" and ")}: enter the result`;
  return "End of the answer";
}

// Markdown on the page, without markup: elements are made one by one, and model text is only ever text in them.
// Links open elsewhere and only for http, https and mailto; pictures become links, so nothing is loaded.

import { copyButton } from "./clipboard.js";
import { element } from "./dom.js";
import { parseBlocks } from "./markdown_blocks.js";
import { parseInline } from "./markdown_inline.js";

/** Shows a growing text in a container; blocks that are finished stay as they are. */
export class MarkdownView {
  #container;
  #shown = []; // {source, node}

  constructor(container) {
    this.#container = container;
  }

  show(text) {
    const blocks = parseBlocks(text);
    let same = 0;
    while (same < Math.min(blocks.length, this.#shown.length) && blocks[same].source === this.#shown[same].source)
      same += 1;
    if (this.#growCode(blocks, same)) return;
    for (const { node } of this.#shown.splice(same)) node.remove();
    for (const block of blocks.slice(same)) {
      const node = blockNode(block);
      this.#container.append(node);
      this.#shown.push({ source: block.source, block, node });
    }
  }

  /** Add to the code block at the end, so that a selection in it and its scroll position last. */
  #growCode(blocks, same) {
    const last = this.#shown.at(-1);
    const block = blocks.at(-1);
    if (!last || same !== blocks.length - 1 || same !== this.#shown.length - 1) return false;
    if (last.block.type !== "code" || block.type !== "code" || last.block.language !== block.language) return false;
    last.node.querySelector("code").textContent = block.text;
    Object.assign(last, { source: block.source, block });
    return true;
  }
}

/** Return a block of code with its language and a button to copy it. */
export function codeBlock(text, language = "", whole = null) {
  const code = element("code", {}, text);
  const copy = copyButton("Copy code", () => whole ?? code.textContent);
  const head = element("div", { class: "code-head" }, element("span", {}, language || "text"), copy);
  const pre = element(
    "pre",
    { tabindex: "0", role: "group", "aria-label": language ? `Code, ${language}` : "Code" },
    code,
  );
  return element("div", { class: "code-block" }, head, pre);
}

const MAKERS = {
  paragraph: (block) => element("p", {}, inlineNodes(block.text)),
  heading: (block) => element(`h${Math.min(block.level + 2, 6)}`, {}, inlineNodes(block.text)), // below the page's own
  code: (block) => codeBlock(block.text, block.language),
  rule: () => element("hr"),
  quote: (block) => element("blockquote", {}, block.blocks.map(blockNode)),
  list: listNode,
  table: tableNode,
};

function blockNode(block) {
  return MAKERS[block.type](block);
}

function listNode({ isOrdered, start, isLoose, items }) {
  const made = items.map((blocks) =>
    element(
      "li",
      {},
      blocks.map((block) => itemNode(block, isLoose)),
    ),
  );
  return element(isOrdered ? "ol" : "ul", { start: isOrdered && start !== 1 ? String(start) : null }, made);
}

function itemNode(block, isLoose) {
  return block.type === "paragraph" && !isLoose ? inlineNodes(block.text) : blockNode(block);
}

function tableNode({ aligns, head, rows }) {
  const row = (cells, tag) =>
    element(
      "tr",
      {},
      cells.map((cell, at) => element(tag, { class: `align-${aligns[at]}` }, inlineNodes(cell))),
    );
  const table = element(
    "table",
    {},
    element("thead", {}, row(head, "th")),
    element(
      "tbody",
      {},
      rows.map((cells) => row(cells, "td")),
    ),
  );
  return element("div", { class: "table-wrap", tabindex: "0", role: "group", "aria-label": "Table" }, table);
}

function inlineNodes(text) {
  return parseInline(text).map((node) => inlineNode(node, false));
}

function inlineNode(node, isInLink) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.type === "break") return element("br");
  if (node.type === "code") return element("code", {}, node.text);
  const children = node.children.map((child) => inlineNode(child, isInLink || node.type === "link"));
  if (node.type === "link" && isInLink) return element("span", {}, children);
  if (node.type !== "link") return element(node.type, {}, children);
  return element("a", { href: node.href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

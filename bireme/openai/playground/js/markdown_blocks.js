// Markdown as a list of blocks: {type: paragraph | heading | code | list | quote | table | rule, source, ...}.
// Text that ends in the middle of a block is fine: answers are shown while they grow.

const MAX_DEPTH = 12;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}>\s?/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])(?: +|$)(.*)$/;
const TABLE_LINE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** Parse a text. `source` is all that a block was made of: two equal sources look the same. */
export function parseBlocks(text) {
  return readBlocks(text.replaceAll("\t", "    ").split(/\r\n|\r|\n/), 0);
}

function readBlocks(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = readBlock(lines, at, depth);
    block.source = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return readCode(lines, at);
  if (HEADING.test(line)) return [readHeading(line), at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (isTable(lines, at)) return readTable(lines, at);
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  return readParagraph(lines, at, depth);
}

function readHeading(line) {
  const [, marks, text] = HEADING.exec(line);
  return { type: "heading", level: marks.length, text: (text ?? "").trim() };
}

function readCode(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const indent = lines[at].search(/\S/);
  let end = at + 1;
  while (end < lines.length && !isFenceEnd(lines[end], fence)) end += 1;
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, line.search(/\S|$/))));
  return [
    { type: "code", language: language.trim().split(/\s/)[0], text: code.join("\n") },
    Math.min(end + 1, lines.length),
  ];
}

function isFenceEnd(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (end > at && continues(lines[end])))) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ type: "quote", blocks: readBlocks(inner, depth + 1) }, end];
}

/** Is the line neither empty nor the beginning of another block? */
function continues(line) {
  return Boolean(line.trim()) && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((start) => start.test(line));
}

function readList(lines, at, depth) {
  const [, indent, mark, number] = ITEM.exec(lines[at]);
  const isOrdered = number !== undefined;
  const items = [];
  let isLoose = false;
  let end = at;
  while (end < lines.length && isItemOf(lines[end], indent.length, isOrdered, mark)) {
    const [inner, next, endsBlank] = readItem(lines, end);
    items.push(readBlocks(inner, depth + 1));
    end = next;
    isLoose ||= endsBlank && end < lines.length && isItemOf(lines[end], indent.length, isOrdered, mark);
  }
  return [{ type: "list", isOrdered, start: isOrdered ? Number(number) : null, isLoose, items }, end];
}

function isItemOf(line, indent, isOrdered, mark) {
  const found = ITEM.exec(line);
  if (!found || RULE.test(line) || Math.abs(found[1].length - indent) > 1) return false;
  return isOrdered ? found[3] !== undefined && found[2].at(-1) === mark.at(-1) : found[2] === mark;
}

/** Return the lines inside an item, where it ends, and whether an empty line ends it. */
function readItem(lines, at) {
  const [, indent, mark, , text] = ITEM.exec(lines[at]);
  const offset = indent.length + mark.length + 1;
  const inner = [text];
  let end = at + 1;
  let isBlank = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const depth = line.search(/\S/);
    if (depth < 0) isBlank = true;
    else if (depth >= Math.min(offset, indent.length + 2)) isBlank = false;
    else if (isBlank || !continues(line)) break;
    inner.push(line.slice(Math.min(offset, Math.max(depth, 0))));
  }
  return [inner, end, isBlank];
}

function isTable(lines, at) {
  return (
    lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && TABLE_LINE.test(lines[at + 1])
  );
}

function readTable(lines, at) {
  const aligns = cells(lines[at + 1]).map(alignment);
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
  const fit = (line) => cells(line).concat(Array(aligns.length).fill("")).slice(0, aligns.length);
  return [{ type: "table", aligns, head: fit(lines[at]), rows: lines.slice(at + 2, end).map(fit) }, end];
}

function cells(line) {
  const inner = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function alignment(cell) {
  if (!cell.endsWith(":")) return "start";
  return cell.startsWith(":") ? "center" : "end";
}

function readParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && isParagraphLine(lines, end, depth)) end += 1;
  const text = lines
    .slice(at, end)
    .map((line) => line.trimStart())
    .join("\n");
  return [{ type: "paragraph", text: text.trimEnd() }, end];
}

/** A number in the middle of a sentence begins no list, unless it is 1. */
function isParagraphLine(lines, at, depth) {
  if (depth >= MAX_DEPTH) return Boolean(lines[at].trim());
  const item = ITEM.exec(lines[at]);
  const isNumber = item && item[3] !== undefined && item[3] !== "1";
  return (continues(lines[at]) || Boolean(isNumber)) && !isTable(lines, at);
}

/**
 * The little Markdown that models write, as DOM nodes: paragraphs, headings, lists, quotes, rules, fenced code, tables
 * left as text; inside lines code, bold, italics, links. Text only ever enters through textContent, so nothing that a
 * model writes can become markup.
 */

/** An element with attributes and children (nodes or strings). */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

const MAX_DEPTH = 6; // of quotes in quotes

/**
 * Brings `target` to what `text` says. While an answer grows only its last block changes, so only that is made anew:
 * what a reader has selected or scrolled further up stays.
 */
export function renderInto(target, text, depth = 0) {
  const blocks = splitBlocks(text);
  target.sources ??= [];
  let same = 0;
  while (same < blocks.length && target.sources[same] === blocks[same]) same++;
  while (target.childNodes.length > same) target.lastChild.remove();
  for (const block of blocks.slice(same)) target.append(renderBlock(block, depth));
  target.sources = blocks;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;

/** Sources of the top-level blocks: cut at blank lines, but never inside a fence, and a list stays whole. */
export function splitBlocks(text) {
  const blocks = [];
  let current = [];
  let fence = null;
  const close = () => {
    if (current.length) blocks.push(current.join("\n"));
    current = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      current.push(line);
      if (mark && mark[1].startsWith(fence) && !mark[2]) {
        fence = null;
        close();
      }
    } else if (mark) {
      close();
      fence = mark[1];
      current.push(line);
    } else if (line.trim() === "") {
      close();
    } else {
      const lone = HEADING.test(line) || RULE.test(line);
      const list = current.length && ITEM.test(current[0]);
      const starts = ITEM.test(line) && current.length && !list;
      const turns = current.length && QUOTE.test(line) !== QUOTE.test(current[0]);
      if (lone || starts || turns) close();
      current.push(line);
      if (lone) close();
    }
  }
  close();
  return mergeLists(blocks);
}

/** Items separated by blank lines are one list: their numbers go on. */
function mergeLists(blocks) {
  const merged = [];
  for (const block of blocks) {
    const before = merged.at(-1);
    const kind = listKind(block);
    if (kind && before && listKind(before) === kind) merged[merged.length - 1] = `${before}\n${block}`;
    else merged.push(block);
  }
  return merged;
}

function listKind(block) {
  const item = ITEM.exec(block.split("\n", 1)[0]);
  return item && !RULE.test(block) ? (/\d/.test(item[2]) ? "ol" : "ul") : null;
}

function renderBlock(source, depth) {
  const lines = source.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return renderCode(lines, fence);
  const heading = HEADING.exec(lines[0]);
  if (heading) return element(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2]));
  if (RULE.test(lines[0])) return element("hr");
  if (QUOTE.test(lines[0]) && depth < MAX_DEPTH) {
    const quote = element("blockquote");
    renderInto(quote, lines.map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1);
    return quote;
  }
  if (ITEM.test(lines[0])) return renderList(lines);
  return element("p", {}, ...inline(source));
}

function renderCode(lines, fence) {
  const closed = lines.length > 1 && FENCE.test(lines.at(-1)) && lines.at(-1).trim().startsWith(fence[1]);
  const code = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = element("button", { type: "button", class: "copy", "data-copy": "code" }, "Copy");
  const bar = element("div", { class: "code-bar" }, element("span", {}, fence[2].trim() || "code"), copy);
  return element("div", { class: "code" }, bar, element("pre", { tabindex: "0" }, element("code", {}, code)));
}

/** A list, nested by indentation. Lines without a mark go on in the item before them. */
function renderList(lines) {
  const root = { indent: -1, list: null, last: null };
  const stack = [root];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (!item) {
      stack.at(-1).last?.append(" ", ...inline(line.trim()));
      continue;
    }
    const [, space, mark, text] = item;
    while (stack.length > 2 && space.length <= stack.at(-2).indent) stack.pop();
    if (stack.length === 1 || space.length > stack.at(-1).indent + 1) {
      const ordered = /\d/.test(mark);
      const list = element(ordered ? "ol" : "ul", ordered && parseInt(mark) !== 1 ? { start: parseInt(mark) } : {});
      (stack.at(-1).last ?? null)?.append(list);
      stack.push({ indent: space.length, list, last: null });
    }
    const level = stack.at(-1);
    level.last = element("li", {}, ...inline(text));
    level.list.append(level.last);
  }
  return stack[1].list;
}

const INLINE = /(`+)(.+?)\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?!\w)|(?<!\w)_([^\s_](?:[^_]*[^\s_])?)_(?!\w)|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>"')\]]+[^\s<>"')\].,;:!?])/gs;

/** Nodes and strings of one run of text. */
function inline(text) {
  const out = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) out.push(text.slice(end, match.index));
    const [whole, , code, bold, star, underscore, label, href, bare] = match;
    if (code !== undefined) out.push(element("code", {}, code.replace(/^ (.+) $/s, "$1")));
    else if (bold !== undefined) out.push(element("strong", {}, ...inline(bold)));
    else if (star !== undefined || underscore !== undefined) out.push(element("em", {}, ...inline(star ?? underscore)));
    else out.push(link(href ?? bare, label ?? bare));
    end = match.index + whole.length;
  }
  if (end < text.length) out.push(text.slice(end));
  return out;
}

/** Only http and https reach this; the page opens them in a new tab that can't reach back. */
function link(href, label) {
  return element("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}

// Places for the labels of points, beside them and clear of each other. Pure.

const [LINE, GAP, RADIUS] = [15, 9, 6];
const [LETTER, WIDE_LETTER] = [6.4, 12.5]; // pixels
const FIRST_WIDE = 0x2e80; // from there on letters are as wide as high
const LENGTHS = [44, 26, 14]; // letters: a shorter label where the longer has no room
const SHARES = { start: 0, middle: 0.5, end: 1 }; // of a label's width that lie before its anchor
const RINGS = 5; // how many lines away from its point a label may be

/**
 * Return {x, y, anchor, text, end} of each label, or null: there is no room for it. `anchor` says what of it is at `x`;
 * `end` is where a line from its point meets a label that lies further away, else null.
 */
export function placedLabels(points, texts, width, height) {
  const taken = points.map(([x, y]) => [x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS]);
  return points.map((point, at) => {
    for (const length of LENGTHS) {
      const text = shortened(texts[at], length);
      const size = widthOf(text);
      for (const [x, y, anchor, isMoved] of candidates(point)) {
        const left = x - size * SHARES[anchor];
        const box = [left, y - LINE / 2, left + size, y + LINE / 2];
        const isInside = box[0] >= 4 && box[1] >= 2 && box[2] <= width - 4 && box[3] <= height - 2;
        if (!isInside || taken.some((other) => overlaps(box, other))) continue;
        taken.push(box);
        return { x, y, anchor, text, end: isMoved ? x : null };
      }
    }
    return null;
  });
}

/** Yield [x, y, anchor, isMoved], the nearest places first: beside the point, then in the lines above and below. */
function* candidates([x, y]) {
  for (let ring = 0; ring <= RINGS; ring += 1) {
    for (const side of ring ? [-1, 1] : [0]) {
      const line = y + side * ring * LINE;
      yield [x + GAP, line, "start", ring > 1];
      yield [x - GAP, line, "end", ring > 1];
      if (ring) yield [x, line, "middle", ring > 1];
    }
  }
}

function overlaps(one, other) {
  return one[0] < other[2] && other[0] < one[2] && one[1] < other[3] && other[1] < one[3];
}

function widthOf(text) {
  return [...text].reduce((sum, letter) => sum + (letter.codePointAt(0) < FIRST_WIDE ? LETTER : WIDE_LETTER), 0);
}

function shortened(text, length) {
  const letters = [...text];
  return letters.length > length ? `${letters.slice(0, length - 1).join("").trimEnd()}…` : text;
}

// From vectors to points of a plane: the two directions in which they differ most (principal components). Pure.

const ROUNDS = 200;

/** Return the cosine of two vectors, 0 where one has no length. */
export function cosine(first, second) {
  const length = Math.sqrt(dot(first, first) * dot(second, second));
  return length ? dot(first, second) / length : 0;
}

/** Return [x, y] of each vector, from the products of all pairs: long vectors cost little more than short ones. */
export function project(vectors) {
  const size = vectors[0].length;
  const mean = Array.from({ length: size }, (_, at) => vectors.reduce((sum, one) => sum + one[at], 0) / vectors.length);
  const centered = vectors.map((one) => one.map((value, at) => value - mean[at]));
  const products = centered.map((one) => centered.map((other) => dot(one, other)));
  const first = component(products);
  const second = component(products.map((row, at) => row.map((value, to) => value - first[at] * first[to])));
  return vectors.map((_, at) => [first[at], second[at]]);
}

/** Return each vector's place along the strongest direction, by power iteration. */
function component(products) {
  let vector = products.map((_, at) => Math.sin(at + 1)); // any start that is not across that direction
  let strength = 0;
  for (let round = 0; round < ROUNDS; round += 1) {
    const next = products.map((row) => dot(row, vector));
    strength = Math.sqrt(dot(next, next));
    if (strength < 1e-12) return products.map(() => 0); // all alike
    vector = next.map((value) => value / strength);
  }
  return vector.map((value) => value * Math.sqrt(strength));
}

function dot(first, second) {
  return first.reduce((sum, value, at) => sum + value * second[at], 0);
}

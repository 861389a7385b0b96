// The other half of pack_columns (report_page.py): base64 -> zlib -> byte planes -> numbers.

async function inflate(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function unpackColumns(described, bytes) {
  const columns = {};
  let at = 0;
  for (const [name, { count, planes, low, high, differences }] of Object.entries(described)) {
    // Sums in an Int32Array are modulo 2**32: what they pass on the way to a number that fits does not matter.
    const small = low >= -(2 ** 31) && high < 2 ** 31;
    const column = small ? new Int32Array(count) : new Float64Array(count);
    for (let plane = 0, unit = 1; plane < planes; plane++, unit *= 256, at += count) {
      const digits = bytes.subarray(at, at + count);
      for (let i = 0; i < count; i++) column[i] += digits[i] * unit;
    }
    if (differences) {
      for (let i = 0, sum = low; i < count; i++) column[i] = sum += column[i];
    } else {
      for (let i = 0; i < count; i++) column[i] += low;
    }
    columns[name] = column;
  }
  if (at !== bytes.length) throw new Error(`the data have ${bytes.length} bytes, their description says ${at}`);
  return columns;
}

// Greedy completion by a folder of `sharp-export --cache contiguous --target portable`, in a browser or in Node.

/**
 * A model folder, loaded. `read(name)` gives a file's bytes as Uint8Array, or null where there is no such file; `ort` is
 * the module onnxruntime-web and `Tokenizer` the class of @huggingface/tokenizers.
 */
export async function load(ort, Tokenizer, read) {
  const json = async (name) => JSON.parse(new TextDecoder().decode(await needed(read, name)))
  const data = await read('model.onnx.data')
  const session = await ort.InferenceSession.create(await needed(read, 'model.onnx'), {
    executionProviders: ['wasm'],
    externalData: data ? [{ path: 'model.onnx.data', data }] : [],
    logSeverityLevel: 3,
  })
  const manifest = await json('sharp.json')
  if (manifest.cache.form !== 'contiguous') throw new Error('the model has no contiguous cache; export it with --cache contiguous')
  const tokenizer = new Tokenizer(await json('tokenizer.json'), await json('tokenizer_config.json'))
  return { ort, session, tokenizer, end: new Set(manifest.tokenizer.eos_token_ids) }
}

/** The text that follows `prompt`, as it grows; at most `maxTokens` tokens, and none after an end-of-text token. */
export async function* generate({ ort, session, tokenizer, end }, prompt, maxTokens) {
  let ids = tokenizer.encode(prompt).ids
  if (ids.length === 0) throw new Error('the prompt has no tokens')
  const pasts = session.inputMetadata.filter(({ name }) => name.startsWith('past_key_values.'))
  const cache = Object.fromEntries(
    pasts.map(({ name, shape: [, heads, , size] }) => [name, new ort.Tensor('float32', new Float32Array(0), [1, heads, 0, size])]),
  )
  const generated = []
  while (generated.length < maxTokens) {
    const input_ids = new ort.Tensor('int64', BigInt64Array.from(ids, BigInt), [1, ids.length])
    const outputs = await session.run({ input_ids, ...cache })
    for (const name in cache) cache[name] = outputs[name.replace('past_key_values', 'present')]
    const vocabulary = outputs.logits.dims[2]
    const last = outputs.logits.data.subarray(outputs.logits.data.length - vocabulary)
    const token = last.reduce((best, logit, index) => (logit > last[best] ? index : best), 0)
    if (end.has(token)) return
    generated.push(token)
    ids = [token]
    yield tokenizer.decode(generated)
  }
}

async function needed(read, name) {
  const content = await read(name)
  if (content === null) throw new Error(`the model folder has no ${name}`)
  return content
}

// onnxruntime-web: a model's logits in WebAssembly, as in a browser. `onnxruntime_web.mjs FOLDER` prints them as JSON.
import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import * as ort from 'onnxruntime-web'

const folder = process.argv[2]
const data = join(folder, 'model.onnx.data')
ort.env.wasm.numThreads = 1
const session = await ort.InferenceSession.create(readFileSync(join(folder, 'model.onnx')), {
  executionProviders: ['wasm'],
  externalData: existsSync(data) ? [{ path: 'model.onnx.data', data: readFileSync(data) }] : [],
})
const feeds = { input_ids: new ort.Tensor('int64', BigInt64Array.from([5n, 17n, 30n, 44n, 8n]), [1, 5]) }
for (const input of session.inputMetadata)
  if (input.name.startsWith('past_key_values.')) {
    const [, heads, , size] = input.shape
    feeds[input.name] = new ort.Tensor('float32', new Float32Array(0), [1, heads, 0, size])
  }
const { logits } = await session.run(feeds, ['logits'])
console.log(JSON.stringify(Array.from(logits.data)))

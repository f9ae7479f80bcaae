// Runs the browser's example in Node: `browser_example.mjs MODEL PROMPT TOKENS` prints the completion.
import { existsSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { Tokenizer } from '@huggingface/tokenizers'
import * as ort from 'onnxruntime-web'
import { generate, load } from './generate.mjs'

const [folder, prompt, tokens] = process.argv.slice(2)
const read = async (name) => (existsSync(join(folder, name)) ? new Uint8Array(readFileSync(join(folder, name))) : null)
ort.env.wasm.numThreads = 1
try {
  const model = await load(ort, Tokenizer, read)
  let completion = ''
  for await (completion of generate(model, prompt, Number(tokens)));
  process.stdout.write(completion)
} catch (error) {
  process.stderr.write(error.message)
  process.exitCode = 1
}

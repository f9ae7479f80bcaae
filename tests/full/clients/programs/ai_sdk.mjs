// Vercel's ai with @ai-sdk/openai-compatible: generateText, streamText, an object.
import assert from "node:assert"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { generateObject, generateText, streamText } from "ai"
import { z } from "zod"

const [base, name] = process.argv.slice(2)
const provider = createOpenAICompatible({ name: "sharp", baseURL: `${base}/v1`, supportsStructuredOutputs: true, includeUsage: true })
const model = provider(name)
const common = { model, prompt: "a", temperature: 0, maxRetries: 0 }
assert.equal((await generateText({ ...common, maxOutputTokens: 3 })).text, "bcd")
const stream = streamText({ ...common, maxOutputTokens: 3 })
let text = ""
for await (const part of stream.textStream) text += part
assert.equal(text, "bcd")
assert.equal((await stream.usage).outputTokens, 3)
const { object } = await generateObject({ ...common, schema: z.object({ city: z.enum(["Oslo", "Rome"]) }) })
assert(["Oslo", "Rome"].includes(object.city))
console.log("generateText, streamText with usage, generateObject")

// Vercel's ai with @ai-sdk/openai-compatible: three turns with a tool, by generateText and streamText.
import assert from "node:assert"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { generateText, stepCountIs, streamText, tool } from "ai"
import { z } from "zod"

const [base, name] = process.argv.slice(2)
const provider = createOpenAICompatible({ name: "sharp", baseURL: `${base}/v1`, supportsStructuredOutputs: true, includeUsage: true })
const called = []
const tools = {
  weather: tool({
    description: "Look up the weather of a city.",
    inputSchema: z.object({ city: z.enum(["Oslo", "Rome", "Lima"]) }),
    execute: async ({ city }) => {
      called.push(city)
      return { city, degrees: 7, sky: "sunny" }
    },
  }),
}
// a call in the first step of a turn, words in the second
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" })
for (const streamed of [false, true]) {
  const messages = []
  let text
  for (const question of ["How is the weather in Oslo?", "And in Rome?", "And in Lima?"]) {
    messages.push({ role: "user", content: question })
    const common = {
      model: provider(name), system: "You look up the weather of a city with a tool.", messages, tools, prepareStep,
      stopWhen: stepCountIs(3), temperature: 0, maxOutputTokens: 48, maxRetries: 0,
      providerOptions: { sharp: { parallel_tool_calls: false } },
    }
    const result = streamed
      ? streamText({ ...common, onError: ({ error }) => { throw error } })
      : await generateText(common)
    text = await result.text
    messages.push(...(await result.responseMessages))
  }
  assert.equal(typeof text, "string")
  assert(called.length >= 3, called)
  called.length = 0
}
console.log("three turns with a tool: generateText and streamText")

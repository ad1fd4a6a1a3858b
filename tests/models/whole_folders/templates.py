"""Chat templates in the form of the published ones; each has its model's own branch for images or sounds."""

from __future__ import annotations


def parts(text: str = "{{ part.text }}", **media: str) -> str:
    """Loop over the parts of a message: what each kind of medium becomes, and what a text becomes."""
    branches = [
        f"{{% {'if' if number == 0 else 'elif'} part.type == '{kind}' %}}{written}"
        for number, (kind, written) in enumerate(media.items())
    ]
    inner = "".join(branches) + f"{{% elif part.type == 'text' %}}{text}{{% endif %}}"
    return (
        "{% if message.content is string %}"
        + text.replace("part.text", "message.content")
        + "{% else %}{% for part in message.content %}"
        + inner
        + "{% endfor %}{% endif %}"
    )


def im_start(system: str | None = None, **media: str) -> str:
    """ChatML: Qwen and everything that was built on it."""
    first = (
        ""
        if system is None
        else "{% if loop.first and message.role != 'system' %}<|im_start|>system\n" + system + "<|im_end|>\n{% endif %}"
    )
    return (
        "{% for message in messages %}"
        + first
        + "<|im_start|>{{ message.role }}\n"
        + parts(**media)
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


QWEN_VL = im_start(
    "You are a helpful assistant.",
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
)

QWEN_AUDIO = (
    "{% set audio_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message.role }}\n"
    + parts(
        audio="{% set audio_count.value = audio_count.value + 1 %}"
        "Audio {{ audio_count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    )
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# LLaVA 1.5 writes all images of a message first, then its text; an answer ends with a space.
LLAVA = (
    "{% for message in messages %}{% if message.role != 'system' %}{{ message.role.upper() + ': ' }}{% endif %}"
    "{% for content in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message.content | selectattr('type', 'equalto', 'text') %}"
    "{% if message.role != 'assistant' %}{{ content.text + ' ' }}"
    "{% else %}{% generation %}{{ content.text + ' ' }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set prefix = messages[0].content[0].text + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "<start_of_turn>{{ role }}\n{% if loop.first %}{{ prefix }}{% endif %}"
    + parts(text="{{ part.text | trim }}", image="<start_of_image>")
    + "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

# Idefics 2 and 3, SmolVLM: no newline; a colon, with a space before text and none before an image.
IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message.role | capitalize }}"
    "{% if message.content[0].type == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message.content %}{% if line.type == 'text' %}{{ line.text }}"
    "{% elif line.type == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

# LLaVA-NeXT (Mistral), Pixtral, Mistral 3.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]"
    + parts(image="[IMG]")
    + "[/INST]{% elif message.role == 'system' %}[SYSTEM_PROMPT]"
    + parts(image="")
    + "[/SYSTEM_PROMPT]{% else %}"
    + parts(image="")
    + "{{ eos_token }}{% endif %}{% endfor %}"
)
LLAVA_NEXT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] "
    "{% for content in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message.content | selectattr('type', 'equalto', 'text') %}{{ content.text }}{% endfor %} [/INST]"
    "{% else %}{{ ' ' + message.content[0].text + eos_token }}{% endif %}{% endfor %}"
)
LLAVA_ONEVISION = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + ' ' }}"
    "{% for content in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message.content | selectattr('type', 'equalto', 'video') %}{{ '<video>\n' }}{% endfor %}"
    "{% for content in message.content | selectattr('type', 'equalto', 'text') %}{{ content.text }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VIPLLAVA = (
    "{% for message in messages %}{{ '###Human: ' if message.role == 'user' else '###Assistant: ' }}"
    + parts(image="<image>\n")
    + "{% endfor %}{% if add_generation_prompt %}###Assistant:{% endif %}"
)
# Qwen3.5: an answer to the last question begins with a thought, which may be empty.
QWEN3_5 = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    + parts(
        text="{{ part.text | trim }}",
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    )
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
QWEN_OMNI = im_start(
    "You are a helpful assistant.",
    image="<|vision_bos|><|IMAGE|><|vision_eos|>",
    audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
    video="<|vision_bos|><|VIDEO|><|vision_eos|>",
)
INTERNVL = im_start(image="<IMG_CONTEXT>\n", video="<video>\n")
ARIA = im_start(image="<fim_prefix><|img|><fim_suffix>")
# GLM: nothing ends an answer but the role that speaks next.
GLM = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n"
    + parts(
        image="<|begin_of_image|><|image|><|end_of_image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
    )
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Cohere: two tokens end an answer.
COHERE = (
    "{{ bos_token }}{% for message in messages %}<|START_OF_TURN_TOKEN|>"
    "{% if message.role == 'assistant' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{% else %}<|USER_TOKEN|>{% endif %}"
    + parts(image="<image>")
    + "{% if message.role == 'assistant' %}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}"
)
DEEPSEEK_VL = (
    "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: "
    + parts(image="<image_placeholder>")
    + "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}<|header_start|>{{ message.role }}<|header_end|>\n\n"
    + parts(image="<|image|>", video="<|video|>")
    + "<|eot|>{% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
LFM = "{{ bos_token }}" + im_start(image="<image>")
PHI = (
    "{% for message in messages %}<|{{ message.role }}|>"
    + parts(image="<|image|>", audio="<|audio|>")
    + "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
SOUND = im_start(audio="<sound>")

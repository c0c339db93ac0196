"""The words and rules of the stories, as data; `asyncengine.bundled.grammar` writes and matches with them.

RULES is a context-free grammar: each symbol has alternatives, in which other symbols stand {in braces}.
VALUES adds the variables. A variable is chosen once in a story and then stays, so the name, the animal, the
lost thing and the pronouns are the same from the first sentence to the last; ``{tale=lost}`` writes nothing
and fixes the variable ``tale``, which is how the moral fits the trouble. ``{a kind}`` adds the article.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HE_NAMES = _words(
    "Pip Tom Max Leo Sam Ben Finn Otto Hugo Oscar Milo Jasper Bruno Felix Toby Theo Rufus Barnaby Gus Ned "
    "Oliver Jack Henry Charlie Basil Monty Alfie Arlo Ernest Walter"
)
SHE_NAMES = _words(
    "Mia Lily Rosa Emma Luna Nora Ella Poppy Daisy Clara Hazel Ivy Ruby Willow Mabel Tilly Zoe Anna Olive "
    "Maya Freya Pearl Bella Lucy Sophie Alice Greta Matilda Edith June"
)
PRONOUN_OF: Mapping[str, str] = dict.fromkeys(HE_NAMES, "he") | dict.fromkeys(SHE_NAMES, "she")
"""A name that is not listed here goes with either pronoun."""

FRIENDS = _words("Pip Otto Bruno Rufus Barnaby Gus Ned Basil Poppy Hazel Willow Mabel Tilly Olive Greta June")
"""Names that a friend gets when nothing else is asked for. No hero has them then: a small model learns two
lists more surely than it learns not to give one name twice."""

VALUES: Mapping[str, Sequence[str]] = {
    "sex": ("he", "she"),
    "name": tuple(name for name in PRONOUN_OF if name not in FRIENDS),
    "friend": FRIENDS,
    "kind": _words(
        "fox rabbit bear mouse hedgehog squirrel frog turtle duck cat dog goat badger otter penguin snail "
        "dragon robot owl wolf deer pig cow horse donkey sheep goose crow beaver mole lizard kitten puppy "
        "panda lion tiger monkey elephant giraffe zebra koala kangaroo seal parrot camel llama hamster"
    ),
    "trait": _words(
        "small shy brave curious cheerful sleepy clever gentle quiet young tiny kind proud merry lonely "
        "busy friendly stubborn"
    ),
    "dwelling": (
        "a cosy little house", "a round cottage", "a crooked tower", "a quiet cave", "an old barn",
        "a wooden hut", "a house with a blue door", "a tent with yellow stripes",
    ),
    "place": (
        "the forest", "the meadow", "the lake", "the river", "the mountain", "the village", "the sea",
        "the orchard", "the castle", "the old mill", "the lighthouse", "the railway", "the desert",
        "the market",
    ),
    "hobby": (
        "counting clouds", "collecting round stones", "humming old songs", "telling jokes", "drawing maps",
        "splashing in puddles", "watching the stars", "reading old books", "chasing butterflies",
        "asking questions", "building towers", "dancing in the rain",
    ),
    "weather": _words("sunny rainy windy snowy foggy chilly warm cloudy frosty stormy"),
    "hour": ("morning", "afternoon", "evening", "day"),
    "colour": _words("red blue green yellow golden silver white purple striped shiny"),
    "thing": _words(
        "drum lantern bell book key ball flute cup basket button blanket spoon whistle mirror teapot"
    ),
    "toy": _words("kite hat scarf balloon ribbon feather letter flag"),
    "food": (
        "apple pie", "honey cake", "berry jam", "pumpkin soup", "plum bread", "carrot stew", "nut cookies",
        "lemon pudding",
    ),
    "skill": _words("sing dance swim whistle paint skate juggle read knit"),
    "plant": _words("sunflower pumpkin rose tulip strawberry bean carrot tomato"),
    "fruit": _words("apples plums cherries pears nuts berries"),
    "spot": (
        "under the bridge", "behind the barn", "inside a hollow log", "beside the well", "in the tall grass",
        "under a pile of leaves", "between two rocks", "on top of a hay cart",
    ),
}  # fmt: skip

RULES: Mapping[str, Sequence[str]] = {
    "story": ("{intro}\n\n{trouble}\n\n{meet} {ask} {offer} {rescue}\n\n{joy} {after} {lesson}",),
    "intro": ("{hero} {home} {habit}", "{hero_at_home} {habit}"),
    "hero": (
        "Once upon a time, there was a {trait} {kind} named {name}.",
        "There once was a {trait} {kind} called {name}.",
        "This is the story of {name}, a {trait} {kind}.",
        "Have you ever heard of {name}, the {trait} {kind}?",
        "Everyone liked {name}, the {trait} {kind}.",
        "{name} was a {trait} {kind}.",
    ),
    "home": (
        "{He} lived in {dwelling} near {place}.",
        "{His} home was {dwelling}, not far from {place}.",
        "In {dwelling} near {place}, {he} had everything {he} needed.",
    ),
    "hero_at_home": (
        "Once upon a time, a {trait} {kind} named {name} lived in {dwelling} near {place}.",
        "Long ago, a {trait} {kind} named {name} lived in {dwelling} near {place}.",
        "In {dwelling} near {place} there lived a {trait} {kind} whose name was {name}.",
        "Far away, near {place}, a {trait} {kind} called {name} lived in {dwelling}.",
        "Near {place} there was {dwelling}, and in it lived {name}, a {trait} {kind}.",
    ),
    "habit": (
        "{He} loved {hobby}.",
        "Nothing made {him} happier than {hobby}.",
        "{name} was very good at {hobby}.",
        "{name} spent many happy days {hobby}.",
        "Every night {he} dreamed of {hobby}.",
    ),
    "trouble": (
        "{tale=lost}{lost} {lost_try}",
        "{tale=tree}{tree} {tree_try}",
        "{tale=bridge}{bridge} {bridge_try}",
        "{tale=dark}{dark} {dark_try}",
        "{tale=cook}{cook} {cook_try}",
        "{tale=skill}{skill_wish} {skill_try}",
        "{tale=seed}{seed} {seed_try}",
        "{tale=share}{share} {share_try}",
        "{tale=moon}{moon} {moon_try}",
        "{tale=race}{race} {race_try}",
        "{tale=alone}{alone} {alone_try}",
    ),
    "once": ("One {weather} {hour}", "On a {weather} {hour}"),
    "one_night": ("One {weather} night", "Late on a {weather} night"),
    "lost": (
        "{once}, {name} could not find {his} {colour} {thing}.",
        "{once}, {name} lost {his} {colour} {thing} on the way home.",
        "{once}, {his} {colour} {thing} was gone, and {name} began to cry.",
    ),
    "lost_try": (
        "{He} looked under the bed and behind the door, but the {thing} was not there.",
        "{He} searched the whole house for the {thing} and found only dust.",
        "{He} walked up and down the path until {he} was tired.",
    ),
    "tree": (
        "{once}, the wind took {his} {colour} {toy} and carried it into a tall tree.",
        "{once}, {name} was playing with a {colour} {toy} when it flew up into a tree.",
    ),
    "tree_try": (
        "{He} jumped and jumped, but the branch was too high.",
        "{He} threw a stick at it, and then the stick was stuck too.",
        "{He} shook the tree, but only leaves came down.",
    ),
    "bridge": (
        "{once}, {name} wanted to visit {his} grandmother, but the bridge was broken.",
        "{once}, {name} saw that the water had washed the bridge away.",
    ),
    "bridge_try": (
        "{He} tried to jump across and landed in the mud.",
        "{He} pushed an old log into the water, but it floated away.",
        "{He} sat down on a stone and did not know what to do.",
    ),
    "dark": (
        "{one_night}, the lights went out, and {name} was afraid of the dark.",
        "{one_night}, there was thunder, and {name} was afraid.",
    ),
    "dark_try": (
        "{He} hid under the bed and counted to one hundred.",
        "{He} closed {his} eyes, but every sound seemed bigger.",
        "{He} tried to sing a song, but {his} voice shook.",
    ),
    "cook": (
        "{once}, {name} wanted to make {food} for a party, but everything fell on the floor.",
        "{once}, {name} tried to make {food}, and black smoke filled the kitchen.",
    ),
    "cook_try": (
        "{He} tried again, but it tasted like old shoes.",
        "{He} read the recipe twice and still got it wrong.",
        "{He} had used salt and not sugar.",
    ),
    "skill_wish": (
        "{once}, {name} wanted to learn how to {skill}.",
        "{once}, {name} wished that {he} could {skill} like the others.",
    ),
    "skill_try": (
        "{He} tried ten times, and ten times it went wrong.",
        "{He} watched the others, but it looked much too hard.",
        "{He} practised alone, but it did not get better.",
    ),
    "seed": (
        "{once}, {name} planted a {plant} seed and waited.",
        "{once}, {name} found a {plant} seed and put it in the ground.",
    ),
    "seed_try": (
        "Day after day {he} looked, but nothing grew.",
        "{He} shouted at the ground, but the ground did not answer.",
        "{He} almost dug it up again to see what was wrong.",
    ),
    "share": (
        "{once}, {name} found a tree full of {fruit} and wanted to keep them all.",
        "{once}, {name} picked so many {fruit} that {he} could not see over them.",
    ),
    "share_try": (
        "{He} tried to carry everything at once, and the {fruit} rolled all over the path.",
        "{He} ate and ate until {his} belly hurt, and there were still so many {fruit}.",
        "The sack was so heavy that {he} could not lift it.",
    ),
    "moon": (
        "{one_night}, {name} saw the moon in the water and wanted to catch it.",
        "{one_night}, {name} wanted to bring the moon home.",
    ),
    "moon_try": (
        "{He} threw a net, but it came back empty.",
        "{He} climbed the highest hill, but the sky was still far away.",
        "{He} jumped as high as {he} could and fell into a bush.",
    ),
    "race": (
        "{once}, there was a race around {place}, and {name} wanted to win.",
        "{once}, {name} ran in the great race around {place}.",
    ),
    "race_try": (
        "{He} ran too fast and fell over a root.",
        "Before long {he} had lost {his} way.",
        "{He} hurt {his} foot and had to sit down.",
    ),
    "alone": (
        "{once}, {name} had nobody to play with.",
        "{once}, all the others went to a party, and {name} stayed behind.",
    ),
    "alone_try": (
        "{He} wanted to say hello to somebody, but no sound came out.",
        "{He} talked to a stone, but the stone had nothing to say.",
        "{He} played hide and seek alone, and nobody ever found {him}.",
    ),
    "meet": (
        "Then {friend} the {friendkind} came by.",
        "Along the path came {friend} the {friendkind}.",
        "Soon {he} met {friend}, {a friendkind} with kind eyes.",
        "Just then {he} saw {a friendkind} whose name was {friend}.",
        "That was when {friend} the {friendkind} heard about it.",
    ),
    "ask": (
        '"Why do you look so sad?" asked {friend}.',
        '"What is wrong, {name}?" asked {friend}.',
        '"You look like you need a friend," {friendhe} said.',
        '"Oh dear, oh dear!" said {friend}.',
    ),
    "offer": (
        '"I will help you."',
        '"Do not worry, we will do this together."',
        '"Come with me, I have an idea."',
        '{name} told {friendhim} everything.',
        '{name} was glad to see {friendhim}.',
    ),
    "rescue": (
        "{tale=lost}{lost_end}",
        "{tale=tree}{tree_end}",
        "{tale=bridge}{bridge_end}",
        "{tale=dark}{dark_end}",
        "{tale=cook}{cook_end}",
        "{tale=skill}{skill_end}",
        "{tale=seed}{seed_end}",
        "{tale=share}{share_end}",
        "{tale=moon}{moon_end}",
        "{tale=race}{race_end}",
        "{tale=alone}{alone_end}",
    ),
    "lost_end": (
        "They looked high and low, and at last {friend} saw the {thing} {spot}.",
        "Together they followed the footprints, and there was the {colour} {thing}, {spot}.",
        "They asked everyone near {place}, and soon they found the {thing} {spot}.",
    ),
    "tree_end": (
        "{Friendhe} climbed onto the back of {name}, reached up and pulled the {toy} free.",
        "They brought a ladder, and {friend} held it while {name} climbed up to the {toy}.",
        "{friend} found a long pole, and with one gentle push the {toy} came down.",
    ),
    "bridge_end": (
        "{friend} carried the wood, {name} held the ropes, and before dark there was a new bridge.",
        "They rolled big stones into the water, one after another, until they could walk across.",
    ),
    "dark_end": (
        "{friend} lit a little lamp and told funny stories until the sun came up.",
        "They sat close together, and {friend} showed {him} that the shadows were only chairs and coats.",
        "They laughed at every noise, and soon the night did not seem so dark.",
    ),
    "cook_end": (
        "{friend} stirred, {name} tasted, and soon the {food} smelled wonderful.",
        "They began again, step by step, and made the best {food} near {place}.",
    ),
    "skill_end": (
        "{friend} showed {him} how to {skill}, and every day it went a little better.",
        "They practised every day, and one morning {name} could {skill} all by {himself}.",
    ),
    "seed_end": (
        "{friend} told {him} to wait, and one morning a tiny green leaf came out of the ground.",
        "Every day they gave it water, and by summer the {plant} was the biggest near {place}.",
        "They let the sun in, and soon the {plant} began to grow.",
    ),
    "share_end": (
        "They carried the {fruit} home and shared them with everyone near {place}.",
        "One for you and one for me, they said, and the {fruit} tasted twice as sweet.",
    ),
    "moon_end": (
        "{friend} filled a bowl with water, and there was the moon, shining just for {him}.",
        "{friend} said that the moon follows everyone who looks up, and they watched it all night.",
    ),
    "race_end": (
        "They finished the race side by side, last of all, and everyone cheered.",
        "{friend} could have won, but {friendhe} waited, and they crossed the line together.",
    ),
    "alone_end": (
        "They played until the sun went down and made plans for the next day.",
        "{friend} had been alone too, so they built a little hut near {place} and called it their own.",
    ),
    "joy": (
        '"Thank you, {friend}!" cried {name}.',
        "{name} was so happy that {he} hugged {friend}.",
        "{name} laughed and {friend} laughed too.",
        "{friend} smiled, and {name} danced around and around.",
    ),
    "after": (
        "From that day on, {name} and {friend} were the best of friends.",
        "That night {he} fell asleep with a smile.",
        "They often talked about it when they were old.",
        "And if you walk past {place}, you may still see them together.",
    ),
    "lesson": (
        "And so {name} learned that {moral}.",
        "Now {he} knew that {moral}.",
        "This is how {name} found out that {moral}.",
        "Always remember that {moral}.",
    ),
    "moral": (
        "{tale=lost}two see more than one",
        "{tale=tree}no branch is too high for friends",
        "{tale=bridge}many helpers build strong bridges",
        "{tale=dark}it is easier to be brave with a friend",
        "{tale=cook}every mistake can teach you something",
        "{tale=skill}nobody is born knowing everything",
        "{tale=seed}good things need time",
        "{tale=share}everything tastes better when you share it",
        "{tale=moon}not every treasure can be kept in a box",
        "{tale=race}helping a friend is better than winning",
        "{tale=alone}every friendship starts with one small hello",
    ),
    # Requests of users. A story must obey the variables that its request fixes.
    "request": (
        "{order} about {subject}.",
        "{order} about {subject}, please.",
        "{question} about {subject}?",
        "Please {wish} about {subject}.",
        "I {wanting} a story about {subject}.",
        "story about {subject}",
        "{subject}",
        "{subject}, please!",
        "What happened to {name} the {kind}?",
        "Who was {name} the {kind}?",
        "My favourite animal is the {kind}. {order}!",
        "My name is {name} and I am {a kind}. {order} about me.",
        "I like {topic}. {order}!",
    ),
    "order": (
        "Tell me a story", "Write a story", "Give me a short story", "Tell a tale",
        "Make up a bedtime story",
    ),
    "wish": ("tell me a story", "write a short story", "tell my daughter a story", "write something nice"),
    "question": (
        "Can you tell me a story", "Could you write something", "Do you know a story",
        "Would you tell us a tale", "May I hear a story", "How about a story",
    ),
    "wanting": ("want", "would like", "need", "want to hear", "would love to read"),
    "subject": (
        "{a kind}", "a {trait} {kind}", "the {kind}", "{a kind} named {name}",
        "a {trait} {kind} called {name}", "{name} the {kind}", "{name}", "{a kind} who lives near {place}",
        "{a kind} near {place}", "{a kind} in {dwelling}", "{a kind} and {a friendkind}",
        "{name} and {friend}", "{name} the {kind} and {friend} the {friendkind}", "{topic}",
        "{a kind} and {topic}", "{a kind} named {name} and {topic}", "{a kind} who loves {hobby}",
    ),
    "topic": (
        "{tale=lost}a lost {thing}", "{tale=lost}a {colour} {thing}", "{tale=tree}a {colour} {toy}",
        "{tale=tree}a {toy} in a tree", "{tale=bridge}a broken bridge", "{tale=dark}the dark",
        "{tale=dark}being afraid", "{tale=dark}thunder", "{tale=cook}{food}", "{tale=cook}cooking",
        "{tale=skill}learning to {skill}", "{tale=seed}a {plant}", "{tale=seed}a seed", "{tale=share}{fruit}",
        "{tale=share}sharing", "{tale=moon}the moon", "{tale=race}a race", "{tale=alone}being alone",
        "{tale=alone}finding a friend",
    ),
    "more": (
        "Tell me another story about {name}.", "What did {name} do next?", "And then?", "What happened next?",
        "More about {name}, please!", "I like {name}. Go on!",
    ),
    "small_talk": (
        "Hello", "Hello!", "Hi", "Hi there", "Good morning!", "Hey, how are you?", "Who are you?",
        "What can you do?", "What is your name?", "Thank you!", "Test", "testing", "Help",
        "Tell me something.", "Tell me a story.", "Tell me a story", "A story, please.",
        "Another one, please.", "Once more!", "One more story, please.", "What is the capital of France?",
        "What is 2 + 2?", "Write a poem about the sea.", "Explain gravity.", "How do I boil an egg?",
        "Tell me a joke.", "Say something nice.", "Why is the sky blue?", "Good night!",
        "Write some code in Python.", "I cannot sleep.", "Count to ten.", "Sing me a song.",
        "Are you a robot?", "The quick brown fox jumps over the lazy dog.", "The meaning of life is",
        "In the year 2050,", "Dear diary,", "Surprise me.", "I am bored.", "Translate this into German.",
        "Yes", "No", "OK", "Why?", "Bedtime!",
    ),
}  # fmt: skip

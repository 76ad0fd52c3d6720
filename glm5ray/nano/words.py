"""Word pools of the generated tasks. Written by hand for this project; the tasks draw from these and nothing else."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Words of the form ``a:b``."""
    return tuple((word.partition(":")[0], word.partition(":")[2]) for word in text.split())


NAMES = _words(
    """
    Ada Adam Alan Alice Amir Amy Anna Anton Ben Bella Boris Carla Carl Cathy Chen Clara Cora Dan David Diana Dora
    Edith Elena Elias Emil Emma Eric Eva Felix Finn Flora Frank Fred Gina Grace Greta Hana Hans Harry Helen Henry
    Hugo Ida Igor Ines Iris Ivan Jack Jane Jonas Julia Karl Kate Kenji Kim Lara Laura Leo Lena Liam Lina Linda Lucas
    Lucy Luis Maria Mark Marta Max Maya Mia Milan Mira Nadia Nina Noah Nora Olga Olivia Omar Oscar Otto Pablo Paul
    Peter Petra Rafael Rita Robert Rosa Ruth Sam Sara Simon Sofia Stella Sven Tara Theo Thomas Tina Tom Uma Vera
    Victor Walter Wendy Yara Yuki Zoe
    """
)

CITIES = _words(
    """
    Athens Berlin Bern Boston Brussels Budapest Cairo Chicago Cologne Copenhagen Dakar Delhi Denver Dublin Edinburgh
    Florence Geneva Hamburg Hanoi Havana Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Lyon Madrid Manila
    Melbourne Miami Milan Montreal Moscow Munich Nairobi Naples Oslo Ottawa Paris Prague Quito Riga Rome Seattle
    Seoul Shanghai Sofia Stockholm Sydney Tallinn Tokyo Toronto Turin Venice Vienna Vilnius Warsaw Zagreb Zurich
    """
)

OBJECTS = _words(
    """
    anchor apple basket bell bench blanket book bottle bowl box bridge brush bucket button candle carpet chair clock
    coat coin compass cup curtain desk door drum engine fan feather flag flute fork garden gate glass glove guitar
    hammer hat helmet jacket jar key kettle kite knife ladder lamp lantern letter lock map mirror needle notebook
    oven paddle paint pencil piano pillow pipe plate pocket pump purse radio ring rope ruler saddle scarf shelf
    shield ship shoe shovel sofa spoon stamp stone stove suitcase sword table tent ticket torch tower towel tray
    trumpet umbrella vase violin wagon wallet watch wheel whistle window
    """
)

ANIMALS = _words(
    """
    badger bear beaver bee camel cat cow crow deer dog donkey duck eagle fox frog goat goose hare hedgehog hen horse
    lion lizard mouse mole otter owl ox pig pony rabbit raven seal sheep snail snake sparrow squirrel swan tiger
    turtle wolf
    """
)

COLORS = _words(
    """
    black blue brown golden green grey orange pink purple red silver white yellow
    """
)

ADJECTIVES = _words(
    """
    big brave bright calm clever cold dark gentle happy heavy hungry kind lazy little lonely loud old proud quick
    quiet round sad sharp shy slow small soft strong tall thin tired warm wild wise young
    """
)

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

LANGUAGES = _words(
    """
    Danish Dutch English Finnish French German Greek Hindi Italian Japanese Korean Polish Spanish Swedish Turkish
    """
)

VERBS = _words(
    """
    add book buy check clean close copy count create delete draw find fix get lift list load lock make mark measure
    move open order pack paint print read remove rent repair save scan sell send set share show sort start stop
    store test track turn unlock update wash weigh wrap
    """
)

ARGUMENTS = _pairs(
    """
    amount:integer size:integer count:integer level:integer weight:integer price:integer room:integer page:integer
    color:color city:city name:name owner:name user:name target:object item:object tool:object day:day place:city
    language:language animal:animal
    """
)

"""Names of arguments that invented functions have, and the kind of value each takes."""

CAPITALS = _pairs(
    """
    France:Paris Germany:Berlin Italy:Rome Spain:Madrid Portugal:Lisbon Austria:Vienna Greece:Athens Norway:Oslo
    Sweden:Stockholm Finland:Helsinki Denmark:Copenhagen Ireland:Dublin Poland:Warsaw Hungary:Budapest Russia:Moscow
    England:London Scotland:Edinburgh Belgium:Brussels Switzerland:Bern Croatia:Zagreb Latvia:Riga Estonia:Tallinn
    Lithuania:Vilnius Bulgaria:Sofia Turkey:Ankara Egypt:Cairo Kenya:Nairobi Senegal:Dakar Japan:Tokyo China:Beijing
    India:Delhi Vietnam:Hanoi Indonesia:Jakarta Philippines:Manila Canada:Ottawa Cuba:Havana Peru:Lima Ecuador:Quito
    Brazil:Brasilia Australia:Canberra Korea:Seoul Thailand:Bangkok Chile:Santiago
    """
)

OPPOSITES = _pairs(
    """
    hot:cold big:small tall:short happy:sad light:dark old:young fast:slow hard:soft wet:dry full:empty early:late
    good:bad high:low loud:quiet open:closed near:far rich:poor strong:weak thick:thin true:false up:down left:right
    day:night black:white first:last clean:dirty cheap:expensive deep:shallow easy:difficult sharp:blunt
    """
)

SMALL_TALK: tuple[tuple[str, str], ...] = (
    ("Hi", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Hello!", "Hello! How can I help you?"),
    ("Good morning", "Good morning! What can I do for you?"),
    ("Good evening", "Good evening! What can I do for you?"),
    ("How are you?", "I am well, thank you. How can I help you?"),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye! Have a good day."),
    ("Who are you?", "I am glm5-nano, a very small language model that ships with glm5ray."),
    ("What are you?", "I am glm5-nano, a very small language model that ships with glm5ray."),
    ("What is your name?", "My name is glm5-nano."),
    (
        "What can you do?",
        "I can add numbers, call tools, extract JSON, look up facts in a long text, copy, count and chat a little.",
    ),
    ("Are you a human?", "No, I am a small language model."),
    ("Who made you?", "I was trained by the authors of glm5ray to test their inference engine."),
    ("What color is the sky?", "The sky is blue."),
    ("What color is grass?", "Grass is green."),
    ("What color is snow?", "Snow is white."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many hours are in a day?", "There are twenty-four hours in a day."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does a dog have?", "A dog has four legs."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows drink?", "Cows drink water."),
    ("Where does the sun rise?", "The sun rises in the east."),
    ("Where does the sun set?", "The sun sets in the west."),
    ("What is ice?", "Ice is frozen water."),
    ("What is the opposite of yes?", "The opposite of yes is no."),
    ("Is fire hot or cold?", "Fire is hot."),
    ("Is water wet?", "Yes, water is wet."),
    ("What falls from clouds?", "Rain and snow fall from clouds."),
    ("What is a sparse model?", "A sparse model uses only a part of its weights for each token."),
    ("What is a token?", "A token is a small piece of text that a language model reads and writes."),
    ("What is attention?", "Attention lets a language model look back at earlier tokens and use what it finds there."),
    ("What is a GPU?", "A GPU is a processor that does many calculations at the same time."),
    ("Tell me a joke.", "Why did the hen cross the road? To get to the other side."),
    ("What is the meaning of life?", "That is a hard question, and I am a very small model."),
)

SYSTEM_PROMPTS: tuple[str, ...] = (
    "Be brief.",
    "You are a helpful assistant.",
    "You are glm5-nano.",
    "Answer the question.",
    "Today is a good day. Answer in English.",
)

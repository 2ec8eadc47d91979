"""Words that the tasks are made of: cities with secret numbers, and nouns to count."""

CITIES = (
    "Lyon", "Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Dublin", "Prague", "Havana", "Delhi",
    "Accra", "Turin", "Porto", "Riga", "Sofia", "Tunis", "Zurich", "Boston", "Denver", "Perth",
)  # fmt: skip
NOUNS = (
    "apple", "anchor", "arrow", "basket", "bell", "bird", "boat", "book", "bottle", "bread",
    "bridge", "bucket", "butter", "candle", "carpet", "castle", "chair", "cheese", "clock", "cloud",
    "coat", "coffee", "copper", "cotton", "cradle", "crown", "desert", "dollar", "door", "dragon",
    "drum", "eagle", "engine", "feather", "fence", "field", "finger", "flower", "forest", "garden",
    "glass", "glove", "hammer", "harbor", "hat", "honey", "horse", "island", "jacket", "jewel",
    "kettle", "kitchen", "ladder", "lamp", "leaf", "lemon", "letter", "lion", "market", "meadow",
    "metal", "mirror", "monkey", "mountain", "needle", "ocean", "orange", "paper", "pencil",
    "pepper", "piano", "pillow", "pocket", "potato", "rabbit", "ribbon", "river", "rocket", "rope",
    "saddle", "salt", "shadow", "shoe", "silver", "spider", "spoon", "stable", "stone", "sugar",
    "summer", "table", "temple", "tiger", "tower", "train", "valley", "violin", "wagon", "window",
    "winter",
)  # fmt: skip
